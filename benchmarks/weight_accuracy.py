"""What weights in fewer bits cost: bits per byte by text and format, through the engine.

    python -m benchmarks.weight_accuracy --data DIR [--model DIR] [--tokens 20000] [--json FILE]

DIR: see `accuracy`. `int4 by output` groups 64 neighbours along the output, as FlexGen does (§4.4 there), `3 bits` has
groups of 64 along the input, and `by row` is one group for each row: none is a format of the engine, so a plain
checkpoint of the numbers that they stand for is written and read. With the demo model 3 bits cost up to +2.62 % in
groups of 64, where int4 costs up to +0.97 %, and both are within int4's bound of 3 %; by row 4 bits cost up to +1.15 %
and 3 bits +6.10 %, which is beyond.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import accuracy
from cellar.engine.llm import LLM
from cellar.models.checkpoint import SAFE
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model, read_config

GROUP = 64


def grouped(matrix: Tensor, bits: int, size: int = GROUP) -> Tensor:
    """matrix: floats [out, in] -> what it stands for in groups along the input: float32, least and largest exact.

    Code = round((w - least) / scale), scale = (largest - least) / (2^bits - 1).
    """
    groups = matrix.float().reshape(matrix.shape[0], -1, size)
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    scale = ((largest - least) / (2**bits - 1)).clamp(min=1e-30)
    meant: Tensor = ((groups - least) / scale).round() * scale + least
    return meant.reshape(matrix.shape)


def by_output(matrix: Tensor, bits: int) -> Tensor:
    """The same with groups along the output, as FlexGen has them."""
    return grouped(matrix.t().contiguous(), bits).t().contiguous()


WRITTEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "int4 by output": lambda matrix: by_output(matrix, 4),
    "3 bits": lambda matrix: grouped(matrix, 3),
    "int4 by row": lambda matrix: grouped(matrix, 4, matrix.shape[1]),
    "3 bits by row": lambda matrix: grouped(matrix, 3, matrix.shape[1]),
}
FORMATS = ("plain", "int8", "w8a8", "fp8", "int4", *WRITTEN)


@contextmanager
def engine(folder: Path, name: str, dtype: str) -> Iterator[LLM]:
    """An engine on the CPU with weights in that format."""
    with TemporaryDirectory() as other:
        model, option = folder, None if name == "plain" else name
        if name in WRITTEN:
            model, option = written(folder, Path(other) / "model", WRITTEN[name]), None
        with LLM(str(model), dtype=dtype, device="cpu", quantization=option, enable_prefix_caching=False) as llm:
            yield llm


def written(folder: Path, other: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """A copy of a checkpoint, in one file, whose layers' matrices are changed; -> where it is."""
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors*"))
    spec = open_model(read_config(folder), "float32").spec
    names = {name for layer in spec.layers for t in layer.tensors if is_linear(t) for name in t.stored}
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    save_file({name: change(t) if name in names else t for name, t in tensors.items()}, other / SAFE)
    return other


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    accuracy.run("weight_accuracy", __doc__ or "", FORMATS, engine, arguments)


if __name__ == "__main__":
    main()
