"""Names and sizes of element types, without torch."""

from __future__ import annotations

from cellar.core.errors import ConfigError

DTYPE_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int4": 0.5,
    "fp8": 1,
    "mxfp4": 0.5,
}

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")

_ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(name: str) -> str:
    """The canonical name of a compute dtype, e.g. `bf16` and `torch.bfloat16` -> `bfloat16`.

    Raises ConfigError for a type that activations cannot have.
    """
    plain = name.removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; use auto, {', '.join(COMPUTE_DTYPES)}.")
    return plain
