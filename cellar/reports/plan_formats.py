"""Formats of weights, K and V that a plan can have: as the model is, as `--formats` says, and all others beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.specs import ModelSpec
from cellar.models.quantization import quantized_on_loading
from cellar.models.registry import with_kv_dtype
from cellar.planner.partition import FORMATS, Formats, formats_of
from cellar.planner.plans import Plan
from cellar.planner.saved import kv_cache_dtype_of

KV_DTYPES = ("fp8", "int4")


@dataclass(frozen=True, slots=True)
class FormatRow:
    """The best plan in one format, and the option that asks for it; no figures if there is no such plan."""

    option: str
    weight_nbytes: int
    kv_nbytes_per_token: int
    tokens_per_second: float | None
    latency_seconds: float | None


def own_formats(spec: ModelSpec, dtype: str | None = None) -> Formats:
    """As a spec runs (in `dtype`, if not in its own): its layers' matrices by their bytes, K and V as plain numbers."""
    plain = formats_of(dtype or spec.dtype)
    names = stored_formats(spec)
    if not names:
        return plain
    matrices = [tensor for layer in spec.layers for tensor in layer.tensors if len(tensor.shape) == 2]
    each = sum(tensor.nbytes for tensor in matrices) / sum(tensor.size for tensor in matrices)
    return replace(plain, name="+".join(names), weight_bytes=each)


def stored_formats(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the quantized formats of a spec, in the order of its tensors."""
    parts = (part for _, tensor in spec.named_tensors() for part in tensor.stored_parts())
    return tuple(dict.fromkeys(part.format.name for part in parts if part.format.is_quantized))


def asked_formats(names: str | None, spec: ModelSpec) -> tuple[Formats, ...]:
    """Those that an option names, with commas, else the spec's own; K and V as the spec has them, if in fewer bits.

    Raises ConfigError for an unknown name, or for a checkpoint that is quantized already.
    """
    if names is None:
        return (_with_kv(own_formats(spec), spec),)
    unknown = [name for name in names.split(",") if name not in FORMATS]
    if unknown:
        raise ConfigError(f"format {unknown[0]!r} is unknown; use {', '.join(FORMATS)}.")
    if stored := stored_formats(spec):
        raise ConfigError(
            f"formats is {names}, but the checkpoint is quantized already ({', '.join(stored)}); leave formats out."
        )
    return tuple(_with_kv(_run_in(spec.dtype, FORMATS[name]), spec) for name in names.split(","))


def _run_in(dtype: str, form: Formats) -> Formats:
    """What is quantized is multiplied in the dtype of the run, which K and V have, too."""
    if not form.quantization or dtype != "float32":
        return form
    return replace(form, compute="float32", kv_bytes=form.kv_bytes if form.kv_cache_dtype else 4.0)


def _with_kv(form: Formats, spec: ModelSpec) -> Formats:
    """With K and V as the spec has them, if in fewer bits."""
    kept, group = kv_cache_dtype_of(spec), spec.kv.groups[0]
    if kept == "auto":
        return form
    each = group.row_nbytes / group.head_dim
    return replace(form, name=f"{form.name}, KV {kept}", kv_bytes=each, kv_cache_dtype=kept)


def in_formats(spec: ModelSpec, form: Formats) -> ModelSpec:
    """The spec that an engine has with the options of these formats.

    Raises ConfigError for rows or heads that cannot be packed.
    """
    if form.quantization:
        spec = quantized_on_loading(spec, form.quantization)
    return with_kv_dtype(spec, form.kv_cache_dtype or "auto")


def compared(spec: ModelSpec, chosen: Plan, best: Callable[[Formats], Plan]) -> tuple[FormatRow, ...]:
    """The chosen plan, and the `best` one in each format of fewer bits that an engine can make of this spec."""
    rows = [_row("as it runs", spec, chosen)]
    found: dict[Formats, Plan | None] = {}
    for option, form in _others(spec, chosen.formats):
        try:
            held = in_formats(spec, form)
        except ConfigError:
            continue
        priced = replace(form, name="", quantization="", kv_cache_dtype="")
        if priced not in found:
            try:
                found[priced] = best(form)
            except (CapacityError, ConfigError):  # nowhere to put it, or too slow
                found[priced] = None
        rows.append(_row(option, held, found[priced]))
    return tuple(rows)


def _others(spec: ModelSpec, own: Formats) -> Iterator[tuple[str, Formats]]:
    plain_kv = kv_cache_dtype_of(spec) == "auto"
    for name, form in FORMATS.items():
        if form.quantization and not stored_formats(spec) and (plain_kv or not form.kv_cache_dtype):
            yield f"--formats {name}", _with_kv(_run_in(spec.dtype, form), spec)
    for kept in KV_DTYPES if plain_kv else ():
        try:
            yield f"--kv-cache-dtype {kept}", _with_kv(own, with_kv_dtype(spec, kept))
        except ConfigError:  # heads that it does not suit
            continue


def _row(option: str, spec: ModelSpec, plan: Plan | None) -> FormatRow:
    rate = latency = None
    if plan is not None:
        rate, latency = plan.tokens_per_second, plan.latency
    return FormatRow(option, spec.nbytes(), spec.kv.nbytes_per_token(), rate, latency)
