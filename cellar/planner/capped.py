"""A model on a device that holds only a part of it, planned from bytes alone: weights may lie elsewhere.

What must be on the device comes first: tables, head and vectors, the ring (two slots of what one layer has elsewhere),
the KV cache, a step's activations and logits. Then as many rows of every layer as fit, the same share of each matrix in
all layers; then host memory, then disk. All else being fixed, a byte in a faster place is never worse, so this is what
the linear program of `linear.py` finds where only weights may leave the device; it needs no rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cellar.core.errors import CapacityError
from cellar.core.messages import BlockSchedule, Placed, PlacedUnits, Placement
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.planner.cost import dimensions
from cellar.planner.offload import logits_bytes, working_bytes
from cellar.planner.saved import Limits, SavedPlan, geometry_of

KV_SHARE = 0.25
"""Of the device's memory, for KV, if nobody says how much: more sequences share a pass's weights, fewer rows stay."""

RING_SLOTS = 2
_ALIGNMENT = 64
_STEPS = 1 << 12


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the model in each place; `host` None: as much as it takes. `kv`: bytes of KV, None: `KV_SHARE`."""

    device: int
    host: int | None = None
    disk: int = 0
    kv: int | None = None


def fits(spec: ModelSpec, room: Room, limits: Limits) -> bool:
    """True if the whole model, KV of `room` and a step's buffers are on the device."""
    # A tied head is multiplied by in a form of its own.
    second = sum(t.nbytes for t in spec.head if spec.tied_head and t.name == "lm_head")
    return spec.nbytes() + second + _kv_nbytes(spec, room) + _buffers(spec, limits) <= room.device


def capped_plan(spec: ModelSpec, room: Room, limits: Limits, *, model: str, machine: str, device: str) -> SavedPlan:
    """The plan. `limits.max_num_seqs` sequences pass a layer as one batch.

    Raises CapacityError, which says how much is missing where.
    """
    kv = _kv_nbytes(spec, room)
    chunks = kv // spec.kv.chunk_nbytes()
    needed = -(-limits.max_model_len // spec.kv.chunk_size)
    if chunks < needed:
        raise CapacityError(
            f"one request of max_model_len {limits.max_model_len} needs {_gib(needed * spec.kv.chunk_nbytes())} of KV, "
            f"but of a device_memory of {_gib(room.device)} it gets {_gib(kv)}; lower max_model_len, raise "
            "device_memory, or give kv_cache_memory_bytes."
        )
    matrices = {t.name for layer in spec.layers for t in layer.tensors if len(t.shape) == 2}
    fixed = chunks * spec.kv.chunk_nbytes() + _buffers(spec, limits)
    fixed += sum(_aligned(t.nbytes) for n, t in spec.named_tensors() if not (_in_layer(n) and t.name in matrices))

    def on_device(share: float) -> int:
        resident = sum(_aligned(_rows(t, share) * _row(t)) for _, t in _matrices(spec))
        slot = max(
            sum(_aligned((t.shape[0] - _rows(t, share)) * _row(t)) for t in layer.tensors if len(t.shape) == 2)
            for layer in spec.layers
        )
        return fixed + resident + RING_SLOTS * slot

    kept = _largest(lambda share: on_device(share) <= room.device)
    if kept is None:
        raise CapacityError(
            f"tables, head, the ring of two layers, KV and buffers take {_gib(on_device(0.0))}, but device_memory is "
            f"{_gib(room.device)}; raise it, or lower max_num_batched_tokens, max_num_seqs, max_model_len or "
            "kv_cache_memory_bytes."
        )

    def in_host(share: float) -> int:
        away = sum((_rows(t, share + kept) - _rows(t, kept)) * _row(t) for _, t in _matrices(spec))
        return away + _ALIGNMENT * len(spec.layers)

    rest = 1.0 - kept
    held = rest if room.host is None else _largest(lambda share: in_host(share * rest) <= (room.host or 0))
    warm = rest if room.host is None else (held or 0.0) * rest
    weights, on_disk = _placed(spec, kept, kept + warm)
    if on_disk > room.disk:
        raise CapacityError(
            f"beside {_gib(room.device)} of device_memory and {_gib(room.host or 0)} of host_memory {_gib(on_disk)} of "
            f"weights are left, but disk is {_gib(room.disk)}; raise one of them, in GiB."
        )
    placement = Placement(
        weights,
        "device",
        "device",
        "offload",
        (PlacedUnits("device", chunks, "device"),),
        (PlacedUnits("device", limits.max_num_seqs, "device"),),
        BlockSchedule(limits.max_num_seqs, 1),
    )
    return SavedPlan(
        model=model,
        geometry=geometry_of(spec),
        dtype=spec.dtype,
        chunk_size=spec.kv.chunk_size,
        machine=machine,
        device=device,
        placement=placement,
        limits=limits,
        cost=None,
        steps=(),
        figures={"plan": f"weights offloaded, {100 * kept:.1f} % of each layer on the device", "machine": machine},
    )


def _placed(spec: ModelSpec, first: float, second: float) -> tuple[tuple[Placed, ...], int]:
    """Rows of each tensor up to the share `first` on the device, up to `second` in host memory; and bytes on disk."""
    found, on_disk = [], 0
    for name, tensor in spec.named_tensors():
        whole = tensor.shape[0]
        if not _in_layer(name) or len(tensor.shape) == 1:
            found.append(Placed(name, "device", 0, whole, spec.dtype))
            continue
        a, b = _rows(tensor, first), _rows(tensor, second)
        for place, start, stop in (("device", 0, a), ("host", a, b), ("disk", b, whole)):
            if start < stop:
                found.append(Placed(name, place, start, stop, spec.dtype))
        on_disk += (whole - b) * _row(tensor)
    return tuple(found), on_disk


def _matrices(spec: ModelSpec) -> list[tuple[str, TensorSpec]]:
    return [(n, t) for n, t in spec.named_tensors() if _in_layer(n) and len(t.shape) == 2]


def _in_layer(name: str) -> bool:
    return name.startswith("layers.")


def _row(tensor: TensorSpec) -> int:
    return tensor.nbytes // tensor.shape[0]


def _rows(tensor: TensorSpec, share: float) -> int:
    return min(tensor.shape[0], math.floor(tensor.shape[0] * share + 1e-9))


def _largest(holds: Callable[[float], bool]) -> float | None:
    """The largest of the shares k / _STEPS for which it holds, given that it holds below; None if for none."""
    if holds(1.0):
        return 1.0
    low, high = -1, _STEPS - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle / _STEPS) else (low, middle - 1)
    return None if low < 0 else low / _STEPS


def _kv_nbytes(spec: ModelSpec, room: Room) -> int:
    return int(room.device * KV_SHARE) if room.kv is None else room.kv


def _buffers(spec: ModelSpec, limits: Limits) -> int:
    """A step's activations and logits."""
    d, elements = dimensions(spec), 2 if spec.dtype == "float32" else 1
    working = working_bytes(d, limits.max_num_batched_tokens) * elements
    return math.ceil(working + logits_bytes(d, limits.max_num_seqs))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
