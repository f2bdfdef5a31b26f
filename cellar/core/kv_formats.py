"""How K and V are written in the cache: in the run's own dtype, or in fewer bits with scales beside them.

K and V of one head and token are a *row*; a quantized row is codes and what turns them into numbers:

    fp8     e4m3 codes, one byte for each number, and one byte b: numbers are code x 2^(b - 127)
    int4    codes of 4 bits; for each half of the row a scale and a least number, bfloat16: scale x code + least

The rows of one head in a chunk lie together, codes first: [token][codes], then [token][scales]. So a chunk is as many
bytes as its rows, wherever it is copied to, and its codes are aligned as plain numbers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.errors import ConfigError

KVFormat: TypeAlias = Literal["plain", "fp8", "int4"]

KV_CACHE_DTYPES = ("auto", "fp8", "int4")
"""What may be asked for; `auto` is the run's own dtype."""

_SAME: Mapping[str, str] = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int4_per_token_head": "int4"}
_ELSEWHERE = (
    "float16",
    "bfloat16",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "int8_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
)

FP8_SCALES_NBYTES = 1
INT4_SCALES_NBYTES = 8
"""Of one row."""


def kv_cache_dtype(name: str) -> str:
    """One of KV_CACHE_DTYPES for a name that vLLM has for it, too. Raises ConfigError for any other."""
    known = _SAME.get(name, name)
    if known not in KV_CACHE_DTYPES:
        said = "is not implemented" if name in _ELSEWHERE or name.startswith("turboquant") else "is not known"
        raise ConfigError(
            f"kv_cache_dtype {name!r} {said}; use auto (the run's dtype), fp8 (e4m3) or int4, both with a scale "
            "for each token and head."
        )
    return known


def kv_format(dtype: str) -> KVFormat:
    """The format of a cache whose element type has that name (`KVGroup.dtype`)."""
    if dtype == "fp8":
        return "fp8"
    return "int4" if dtype == "int4" else "plain"


def codes_nbytes(format: KVFormat, head_dim: int) -> int:
    """Bytes of the codes of a quantized row."""
    return head_dim if format == "fp8" else head_dim // 2


def row_nbytes(dtype: str, head_dim: int) -> int:
    """Bytes of K, or of V, of one head and token, scales included. Raises ConfigError for an odd head in int4."""
    format = kv_format(dtype)
    if format == "plain":
        return int(head_dim * DTYPE_BYTES[dtype])
    if format == "int4" and head_dim % 2:
        raise ConfigError(f"kv_cache_dtype int4 packs two numbers a byte, but heads have {head_dim}; use fp8.")
    return codes_nbytes(format, head_dim) + (FP8_SCALES_NBYTES if format == "fp8" else INT4_SCALES_NBYTES)
