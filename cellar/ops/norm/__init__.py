"""Norms, and the add of the residual before them; what they mean stands in `definition.py`."""

from __future__ import annotations

from torch import Tensor

from cellar.ops.norm import cases
from cellar.ops.norm.cpu import add_rms_norm_cpu, rms_norm_cpu
from cellar.ops.norm.definition import add_layer_norm_definition, add_rms_norm_definition, rms_norm_definition
from cellar.ops.norm.triton import (
    add_layer_norm_kernel,
    add_rms_norm_behind_sum,
    add_rms_norm_kernel,
    rms_norm_kernel,
)
from cellar.ops.registry import Op, Variant

__all__ = ["OPS", "add_layer_norm", "add_rms_norm", "add_rms_norm_behind_sum", "rms_norm"]

_RMS_NORM = Op(
    "rms_norm",
    rms_norm_definition,
    (Variant("triton", rms_norm_kernel), Variant("cpu", rms_norm_cpu)),
    cases.RMS_NORM,
)
_ADD_RMS_NORM = Op(
    "add_rms_norm",
    add_rms_norm_definition,
    (Variant("triton", add_rms_norm_kernel), Variant("cpu", add_rms_norm_cpu)),
    cases.ADD_RMS_NORM,
)
_ADD_LAYER_NORM = Op(
    "add_layer_norm", add_layer_norm_definition, (Variant("triton", add_layer_norm_kernel),), cases.ADD_LAYER_NORM
)
OPS = (_RMS_NORM, _ADD_RMS_NORM, _ADD_LAYER_NORM)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: x: [..., d], any strides; weight: [d] -> like x."""
    return (_RMS_NORM.on_cpu if x.is_cpu else _RMS_NORM.on_gpu)(x, weight, eps)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta), residual + delta): all [t, d]; delta None: nothing to add; weight: [d]."""
    return (_ADD_RMS_NORM.on_cpu if residual.is_cpu else _ADD_RMS_NORM.on_gpu)(residual, delta, weight, eps)


def add_layer_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """-> (layer_norm(residual + delta), residual + delta): all [t, d] (delta may be None); weight, bias: [d]."""
    run = _ADD_LAYER_NORM.on_cpu if residual.is_cpu else _ADD_LAYER_NORM.on_gpu
    return run(residual, delta, weight, bias, eps)
