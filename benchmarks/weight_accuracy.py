"""What weights in fewer bits cost: bits per byte by text and format, through the engine.

    python -m benchmarks.weight_accuracy --data DIR [--model DIR] [--tokens 20000] [--json FILE]

Texts and windows are those of `kv_accuracy`. `int4 by output` groups 64 neighbours along the output, as FlexGen does
(§4.4 there), and `3 bits` has groups of 64 along the input: neither is a format of the engine, so a plain checkpoint of
the numbers that they stand for is written and read. 3 bits exceed int4's bound, so that the bound means something. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.kv_accuracy import bits_per_byte, texts_of, windows_of
from cellar import demo
from cellar.engine.llm import LLM
from cellar.models.checkpoint import SAFE
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model, read_config

GROUP = 64


def grouped(matrix: Tensor, bits: int) -> Tensor:
    """matrix: floats [out, in] -> what it stands for in groups of 64 along the input: float32, least and largest exact.

    Code = round((w - least) / scale), scale = (largest - least) / (2^bits - 1).
    """
    groups = matrix.float().reshape(matrix.shape[0], -1, GROUP)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_accuracy", description=(__doc__ or "")[:70])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=demo.path(), help="directory; default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = {name: windows_of(found, tokenizer, options.tokens) for name, found in texts_of(options.data).items()}
    found: dict[str, dict[str, float]] = {name: {} for name in texts}
    for name in options.formats.split(","):
        with engine(options.model, name, options.dtype) as llm:
            for text, windows in texts.items():
                found[text][name] = bits = bits_per_byte(llm, windows, tokenizer)
                more = f"{100 * (bits / found[text]['plain'] - 1):+.3f} %" if "plain" in found[text] else ""
                print(f"{text:12} {name:14} {bits:.5f} bits per byte {more}", flush=True)
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
