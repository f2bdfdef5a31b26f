"""What K and V in fewer bits, and values of the largest scores alone, cost: bits per byte by text and format.

    python -m benchmarks.kv_accuracy --data DIR [--model DIR] [--tokens 20000] [--json FILE]

DIR: see `accuracy`. All attention reads the cache. `3 bits` is int4's form with 8 codes. With the demo model it costs
+0.8 to +1.5 % where int4 costs at most +0.41 %: more, and still within int4's bound of 3 %, which a model that depends
more on its K and V would have to put to the test. `sparse V` reads the values of a tenth of the positions before a
token's own (`--sparse-v 0.1`, FlexGen §5), for every token of a text from the first one on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import accuracy
from cellar.core.kv_formats import KVFormat
from cellar.engine.llm import LLM
from cellar.ops.kv_format import quantized

THREE_BITS = "3 bits"
SPARSE = " + sparse V"
SHARE = 0.1
FORMATS = ("auto", "fp8", "int4", THREE_BITS, f"auto{SPARSE}", f"int4{SPARSE}")


def three_bits(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """As `quantized` has int4, but with the codes 0 to 7."""
    wide = x.float()
    halves = wide.reshape(*wide.shape[:-1], 2, -1)
    least, largest = halves.aminmax(dim=-1, keepdim=True)
    scale, least = ((largest - least) / 7).bfloat16(), least.bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = ((halves - least.float()) * inverse).clamp_(0, 7).round_().to(torch.uint8)
    scales = torch.stack((scale, least), dim=-1).flatten(-3)
    return codes[..., 0, :] | codes[..., 1, :] << 4, scales.view(torch.uint8)


@contextmanager
def engine(folder: Path, name: str, dtype: str) -> Iterator[LLM]:
    """An engine on the CPU with K and V in that format."""
    share = SHARE if name.endswith(SPARSE) else None
    name = name.removesuffix(SPARSE)
    how = three_bits if name == THREE_BITS else quantized
    kept = "int4" if name == THREE_BITS else name
    options = {"dtype": dtype, "device": "cpu", "kv_cache_dtype": kept, "sparse_v": share}
    with (
        patch("cellar.ops.rotary.definition.quantized", how),
        LLM(str(folder), enable_prefix_caching=False, **options) as llm,
    ):
        yield llm


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    accuracy.run("kv_accuracy", __doc__ or "", FORMATS, engine, arguments)


if __name__ == "__main__":
    main()
