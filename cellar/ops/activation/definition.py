"""Activations of feed-forward layers, plain and gated: silu, gelu (by erf), gelu_tanh, relu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from torch import Tensor
from torch.nn import functional

from cellar.core.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
}


def gated_definition(x: Tensor, kind: str) -> Tensor:
    """act(gate) * up (Shazeer, arXiv 2002.05202): x: [t, 2n], gate then up -> [t, n].

    The activation is rounded to x's dtype before the product. Raises ConfigError for an activation that is not known.
    """
    gate, up = x.chunk(2, dim=-1)
    return function_of(kind)(gate).mul_(up)


def activate_definition(x: Tensor, kind: str) -> Tensor:
    """act(x) of every element: x: [t, n] -> [t, n]. Raises ConfigError for an activation that is not known."""
    return function_of(kind)(x)


def function_of(kind: str) -> Callable[[Tensor], Tensor]:
    function = _FUNCTIONS.get(kind)
    if function is None:
        raise ConfigError(f"activation {kind!r} is not known; known are {', '.join(_FUNCTIONS)}.")
    return function


def kinds() -> tuple[Activation, ...]:
    """The names of all activations."""
    return cast(tuple[Activation, ...], tuple(_FUNCTIONS))
