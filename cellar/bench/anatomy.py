"""What a model is and costs, and how much of it fits this machine: from its config alone, no weight is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from cellar import demo
from cellar.core.config import CacheConfig
from cellar.core.specs import ModelSpec
from cellar.models.hub import resolve
from cellar.models.registry import auto_dtype, open_model, read_config, shipped_config
from cellar.runtime.memory import host_available, human


@dataclass(frozen=True)
class Anatomy:
    """Sizes in bytes, work in FLOPs, per token. `fits` says whether the weights do; then so many tokens of KV do."""

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
    kv_nbytes_per_token: int
    flops_per_token: int
    flops_per_token_full_context: int
    device: str
    memory_nbytes: int
    fits: bool
    kv_tokens: int
    full_sequences: int

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def dissect(model: str | None, dtype: str = "auto", max_model_len: int | None = None) -> Anatomy:
    """The anatomy of a directory, a hub name, a shipped config's name, or (None) the demo model.

    Raises CheckpointError if there is none, or of an unknown architecture; ConfigError for options out of range.
    """
    device, memory = _memory()
    spec = spec_of(model, "cpu" if device == "cpu" else "gpu", dtype, max_model_len)
    return anatomy(model or "demo", spec, device, int(memory * CacheConfig().gpu_memory_utilization))


def spec_of(model: str | None, device: str, dtype: str = "auto", max_model_len: int | None = None) -> ModelSpec:
    """What a model is, by the name that `dissect` takes; `device` is cpu or another kind, for dtype `auto`."""
    config = shipped_config(model) if model is not None else None
    if config is None:
        config = read_config(resolve(model if model is not None else demo.path()))
    kind = auto_dtype(config, device) if dtype == "auto" else dtype
    return open_model(config, kind, CacheConfig().block_size, max_model_len).spec


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
        kv_nbytes_per_token=spec.kv.nbytes_per_token(),
        flops_per_token=spec.flops(1, 0, 1),
        flops_per_token_full_context=spec.flops(1, spec.max_position, 1),
        device=device,
        memory_nbytes=memory,
        fits=left > 0,
        kv_tokens=tokens,
        full_sequences=tokens // spec.max_position,
    )


def print_anatomy(a: Anatomy) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    heads = f"{a.num_heads} heads of {a.head_dim}, {a.num_kv_heads} for K and V"
    rows = {
        "architecture": f"{a.model_type}, {a.num_layers} layers, hidden {a.hidden_size}, MLP {a.intermediate_size}",
        "attention": heads + (f", window {a.window:,}" if a.window else "") + (f", {a.rope} rotary" if a.rope else ""),
        "vocabulary": f"{a.vocab_size:,}" + (", head tied to the embedding" if a.tied_head else ""),
        "context": f"{a.context:,} tokens",
        "parameters": f"{a.num_parameters:,}",
        "weights": f"{human(a.weight_nbytes)} in {a.dtype}",
        "KV cache per token": human(a.kv_nbytes_per_token),
        "FLOPs per token": f"{a.flops_per_token:.3g}, {a.flops_per_token_full_context:.3g} at full context",
        f"fits here ({a.device})": _fit(a),
    }
    table = Table(title=a.model, show_header=False, title_justify="left")
    for label, value in rows.items():
        table.add_row(label, value)
    Console(highlight=False).print(table)


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
