"""Which matrices of a model are quantized, as functions over its spec: as a checkpoint says, or as an option wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cellar.core.errors import CheckpointError, ConfigError
from cellar.core.formats import Format
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.quant.config import Scheme

# --quantization: formats of the layers' matrices, the first whose groups divide their rows; and of the head.
_ON_LOADING = {
    "int4": (Format("int4", 64, zero_points=True), Format("int4", 32, zero_points=True)),
    "int8": (Format("int8"),),
    "fp8": (Format("fp8", activations="fp8"),),
    "w8a8": (Format("int8", activations="int8"),),
}
_HEAD = {
    "int4": Format("int8"),
    "int8": Format("int8"),
    "fp8": Format("fp8", activations="fp8"),
    "w8a8": Format("int8"),
}


def is_linear(tensor: TensorSpec) -> bool:
    """True for a matrix that `linear` multiplies by (and that may be packed), false for tables, norms and biases."""
    return len(tensor.shape) == 2 and tensor.name not in ("embed", "positions")


def module_of(stored: str) -> str:
    """The module whose weight a stored tensor is."""
    return stored.removesuffix(".weight")


def with_scheme(spec: ModelSpec, scheme: Scheme) -> ModelSpec:
    """The spec with the formats of a checkpoint's quantization_config.

    Raises CheckpointError if it matches nothing, or something that cannot be quantized.
    """

    def change(tensor: TensorSpec) -> TensorSpec:
        if not is_linear(tensor) or (tensor.name == "lm_head" and spec.tied_head):
            return tensor
        plain = Format(tensor.dtype)
        formats = tuple(scheme.format_of(module_of(part.name)) or plain for part in tensor.stored_parts())
        if not any(format.is_quantized for format in formats):
            return tensor
        if tensor.heads is not None:
            raise CheckpointError(
                f"{tensor.stored[0]} is quantized ({scheme.method}), which is not implemented for model_type "
                f"{spec.model_type}; use a plain checkpoint, with --quantization."
            )
        return replace(tensor, formats=formats)

    found = _changed(spec, change)
    if found == spec:
        raise CheckpointError(
            f"the quantization config ({scheme.method}) matches no module of model_type {spec.model_type}; check its "
            "targets and exceptions."
        )
    return found


def quantized_on_loading(spec: ModelSpec, name: str) -> ModelSpec:
    """The spec of a plain checkpoint whose matrices are quantized as they are read, the head to 8 bits.

    A tied head becomes a matrix of its own. Raises ConfigError if rows have no whole number of groups.
    """

    def change(tensor: TensorSpec) -> TensorSpec:
        if tensor.name == "lm_head":
            format = _HEAD[name]
        elif tensor in inner:
            fits = [format for format in _ON_LOADING[name] if tensor.shape[1] % max(2, format.group) == 0]
            if not fits:
                raise ConfigError(
                    f"{name} wants rows in groups of 32, but those of {tensor.name} have {tensor.shape[1]} numbers; "
                    "take int8 or fp8."
                )
            format = fits[0]
        else:
            return tensor
        return replace(tensor, formats=(format,) * len(tensor.stored_parts()))

    inner = {tensor for layer in spec.layers for tensor in layer.tensors if is_linear(tensor)}
    return replace(_changed(spec, change), tied_head=False)


def _changed(spec: ModelSpec, change: Callable[[TensorSpec], TensorSpec]) -> ModelSpec:
    return replace(
        spec,
        layers=tuple(replace(layer, tensors=tuple(map(change, layer.tensors))) for layer in spec.layers),
        embedding=tuple(map(change, spec.embedding)),
        head=tuple(map(change, spec.head)),
    )
