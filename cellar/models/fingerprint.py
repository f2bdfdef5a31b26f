"""A fingerprint of a model's weights: equal for equal content, wherever the files lie, and cheap beside loading them.

Of every file of weights it takes the size, and of every tensor in it the name, type, shape and three blocks: where it
begins, its middle, its end. Training, merging and quantizing change nearly every element of the tensors they touch; a
change of single elements between the blocks is not seen. Whoever makes one gives the checkpoint another cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from cellar.core.errors import CheckpointError
from cellar.core.specs import ModelSpec

BLOCK = 4096
# Of a file without a header of offsets (pickled), a block of every so many bytes.
_STRIDE = 2**20
_MAX_HEADER = 100 * 2**20


def of_checkpoint(directory: Path) -> bytes:
    """Of the weights in a directory, 32 bytes. Raises CheckpointError if a file cannot be read."""
    digest = blake2b(digest_size=32)
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    for path in files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{path.name} {size} ".encode())
                for begin in _blocks(file, size, path.suffix == ".safetensors"):
                    file.seek(begin)
                    digest.update(file.read(BLOCK))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged or cannot be read ({error}); get it again.") from error
    return digest.digest()


def of_dummy(spec: ModelSpec, seed: int, device_kind: str) -> bytes:
    """Of the random weights that `loader.dummy` makes: they follow from these three."""
    named = " ".join(f"{t.name}{list(t.shape)}{t.dtype}{t.formats}" for t in spec.tensors())
    return blake2b(f"dummy {seed} {device_kind} {named}".encode(), digest_size=32).digest()


def of_quantized(content: bytes, quantization: str) -> bytes:
    """Of weights that were quantized when they were loaded: other numbers, so other K and V."""
    return blake2b(content + quantization.encode(), digest_size=32).digest()


def of_sparse(content: bytes, sparse_v: float) -> bytes:
    """Of weights under attention that reads a share of the values: what a layer adds is another, and so is later KV."""
    return blake2b(content + f"sparse_v {sparse_v!r}".encode(), digest_size=32).digest()


def _blocks(file: BinaryIO, size: int, safe: bool) -> Iterator[int]:
    """Where the blocks of a file begin, header included."""
    if not safe:
        yield from range(0, size, _STRIDE)
        yield max(0, size - BLOCK)
        return
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size, _MAX_HEADER):
        raise ValueError(f"its header of {length} bytes does not fit")
    header = json.loads(file.read(length))
    yield from range(0, 8 + length, BLOCK)
    for name in sorted(header):
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
            yield from sorted({begin, max(begin, (begin + end - BLOCK) // 2), max(begin, end - BLOCK)})
