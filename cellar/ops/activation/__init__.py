"""Activations of feed-forward layers, plain and gated; what they mean stands in `definition.py`."""

from __future__ import annotations

from torch import Tensor

from cellar.ops.activation import cases
from cellar.ops.activation.cpu import activate_cpu, gated_cpu
from cellar.ops.activation.definition import Activation, activate_definition, gated_definition, kinds
from cellar.ops.activation.triton import activate_kernel, gated_kernel
from cellar.ops.registry import Op, Variant

__all__ = ["OPS", "Activation", "activate", "gated", "kinds"]

_GATED = Op("gated", gated_definition, (Variant("triton", gated_kernel), Variant("cpu", gated_cpu)), cases.GATED)
_ACTIVATE = Op(
    "activate", activate_definition, (Variant("triton", activate_kernel), Variant("cpu", activate_cpu)), cases.ACTIVATE
)
OPS = (_GATED, _ACTIVATE)


def gated(x: Tensor, kind: str) -> Tensor:
    """act(gate) * up: x: [t, 2n], gate then up -> [t, n]; kind: one of `kinds()`."""
    return (_GATED.on_cpu if x.is_cpu else _GATED.on_gpu)(x, kind)


def activate(x: Tensor, kind: str) -> Tensor:
    """act(x) of every element: x: [t, n] -> [t, n]; kind: one of `kinds()`."""
    return (_ACTIVATE.on_cpu if x.is_cpu else _ACTIVATE.on_gpu)(x, kind)
