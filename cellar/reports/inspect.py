"""What a model is and costs, and how much of it fits this machine: from its config alone, no weight is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from cellar.core.config import CacheConfig
from cellar.core.formats import Format
from cellar.core.specs import ModelSpec
from cellar.reports.models import model_spec
from cellar.runtime.memory import host_available, human


@dataclass(frozen=True)
class Share:
    """Tensors of one name, alike in `count` layers (1: outside of them): bytes of all, FLOPs that they cost a token."""

    name: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    flops_per_token: int


@dataclass(frozen=True)
class Anatomy:
    """Sizes in bytes, work in FLOPs, per token. `fits` says whether the weights do; then so many tokens of KV do.

    `weight_formats` are the bytes of each format, scales included; `shares` say where every byte of the weights goes.
    """

    model: str
    model_type: str
    dtype: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    rope: str | None
    window: int | None
    tied_head: bool
    num_parameters: int
    weight_nbytes: int
    weight_formats: dict[str, int]
    kv_dtype: str
    kv_nbytes_per_token: int
    flops_per_token: int
    flops_per_token_full_context: int
    device: str
    memory_nbytes: int
    fits: bool
    kv_tokens: int
    full_sequences: int
    shares: tuple[Share, ...]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def dissect(
    model: str | None, dtype: str = "auto", max_model_len: int | None = None, kv_cache_dtype: str = "auto"
) -> Anatomy:
    """The anatomy of a directory, a hub name, a shipped config's name, or (None) the demo model.

    Raises CheckpointError if there is none, or of an unknown architecture; ConfigError for options out of range.
    """
    device, memory = _memory()
    kind = "cpu" if device == "cpu" else "gpu"
    spec = model_spec(model, kind, dtype, max_model_len, kv_cache_dtype=kv_cache_dtype)
    return anatomy(model or "demo", spec, device, int(memory * CacheConfig().gpu_memory_utilization))


def anatomy(name: str, spec: ModelSpec, device: str, memory: int) -> Anatomy:
    """`memory` is what weights and KV may take, in bytes; buffers of a step are not counted."""
    left = memory - spec.nbytes()
    tokens = max(left, 0) // spec.kv.nbytes_per_token()
    windows = {layer.window for layer in spec.layers if layer.window is not None}
    return Anatomy(
        model=name,
        model_type=spec.model_type,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        context=spec.max_position,
        rope=spec.rope.kind if spec.rope else None,
        window=min(windows) if windows else None,
        tied_head=spec.tied_head,
        num_parameters=spec.num_parameters(),
        weight_nbytes=spec.nbytes(),
        weight_formats=_formats(spec),
        kv_dtype=spec.kv.groups[0].dtype,
        kv_nbytes_per_token=spec.kv.nbytes_per_token(),
        flops_per_token=spec.flops(1, 0, 1),
        flops_per_token_full_context=spec.flops(1, spec.max_position, 1),
        device=device,
        memory_nbytes=memory,
        fits=left > 0,
        kv_tokens=tokens,
        full_sequences=tokens // spec.max_position,
        shares=_shares(spec),
    )


def _formats(spec: ModelSpec) -> dict[str, int]:
    """Bytes by format, the largest first."""
    found: dict[str, int] = {}
    for _, tensor in spec.named_tensors():
        if not tensor.formats:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
            continue
        for part in tensor.stored_parts():
            name = _format_words(part.format)
            found[name] = found.get(name, 0) + part.format.nbytes(part.shape)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _format_words(format: Format) -> str:
    """`int4 in groups of 128`, `fp8 in blocks of 128 x 128 with activations in fp8`."""
    if not format.is_quantized:
        return format.name
    across = f"blocks of {format.rows} x {format.group}" if format.rows > 1 else f"groups of {format.group}"
    how = f"in {across}" if format.group else "by row" if format.rows else "by matrix"
    return f"{format.name} {how}" + (f" with activations in {format.activations}" if format.activations else "")


def _words(a: Anatomy) -> str:
    """One format, or the bytes of each; and what products are in, where that differs."""
    if list(a.weight_formats) == [a.dtype]:
        return f" in {a.dtype}"
    parts = (f"{human(nbytes)} {name}" for name, nbytes in a.weight_formats.items())
    return f": {', '.join(parts)}; computed in {a.dtype}"


def _shares(spec: ModelSpec) -> tuple[Share, ...]:
    """Every tensor, those of one name and shape in several layers together, in the order of a step.

    An embedding that is the head, too, has the head's FLOPs.
    """
    flops = {operation.name: operation.flops for operation in spec.operations(1, 0, 1)}
    if spec.tied_head:
        flops["embed"] = flops["lm_head"]
    found: dict[tuple[str, tuple[int, ...]], Share] = {}
    for _, tensor in spec.named_tensors():
        before = found.get((tensor.name, tensor.shape))
        count, nbytes = (before.count, before.nbytes) if before else (0, 0)
        work = flops.get(tensor.name, 0) * (count + 1)
        found[tensor.name, tensor.shape] = Share(tensor.name, tensor.shape, count + 1, nbytes + tensor.nbytes, work)
    return tuple(found.values())


def print_anatomy(a: Anatomy) -> None:
    """Tables for people."""
    heads = f"{a.num_heads} heads of {a.head_dim}, {a.num_kv_heads} for K and V"
    rows = {
        "architecture": f"{a.model_type}, {a.num_layers} layers, hidden {a.hidden_size}, MLP {a.intermediate_size}",
        "attention": heads + (f", window {a.window:,}" if a.window else "") + (f", {a.rope} rotary" if a.rope else ""),
        "vocabulary": f"{a.vocab_size:,}" + (", head tied to the embedding" if a.tied_head else ""),
        "context": f"{a.context:,} tokens",
        "parameters": f"{a.num_parameters:,}",
        "weights": f"{human(a.weight_nbytes)}{_words(a)}",
        "KV cache per token": f"{human(a.kv_nbytes_per_token)} in {a.kv_dtype}",
        "FLOPs per token": f"{a.flops_per_token:.3g}, {a.flops_per_token_full_context:.3g} at full context",
        f"fits here ({a.device})": _fit(a),
    }
    table = Table(title=a.model, show_header=False, title_justify="left")
    for label, value in rows.items():
        table.add_row(label, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(_share_table(a))


def _share_table(a: Anatomy) -> Table:
    """Where every byte of the weights goes, and of a token's K and V."""
    table = Table(title="Where the bytes go", title_justify="left")
    for label in ("tensor", "shape"):
        table.add_column(label, no_wrap=True)
    for label in ("times", "bytes", "share", "FLOPs a token"):
        table.add_column(label, justify="right")
    for share in a.shares:
        part = f"{100 * share.nbytes / a.weight_nbytes:.1f} %"
        flops = f"{share.flops_per_token:.3g}" if share.flops_per_token else ""
        shape = " x ".join(str(length) for length in share.shape)
        table.add_row(share.name, shape, str(share.count), human(share.nbytes), part, flops)
    table.add_row("all weights", "", "", human(a.weight_nbytes), "100 %", f"{a.flops_per_token:.3g}")
    layers = f"{a.num_layers} x 2 x {a.num_kv_heads} x {a.head_dim}"
    table.add_row("KV of a token", layers, "", human(a.kv_nbytes_per_token), "", "")
    return table


def _fit(a: Anatomy) -> str:
    if not a.fits:
        return f"no: the weights need {human(a.weight_nbytes)}, but {human(a.memory_nbytes)} may be used"
    kv = f"{a.kv_tokens:,} tokens of KV ({a.full_sequences:,} full contexts)"
    return f"yes: weights and {kv} in {human(a.memory_nbytes)}"


def _memory() -> tuple[str, int]:
    """The device that `auto` would choose, and its free bytes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), int(torch.cuda.mem_get_info()[0])
    return "cpu", host_available()
