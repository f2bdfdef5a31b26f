"""A resident placement: checked before anything is read, and compared with what lies in memory afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cellar.core.errors import ConfigError, IntegrityError
from cellar.core.messages import Placement
from cellar.core.pieces import format_name
from cellar.core.specs import ModelSpec
from cellar.models.loader import LoadedWeights
from cellar.ops.linear.weight import Weight
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.memory_use import weights_nbytes

DEVICE = "device"


@dataclass(frozen=True, slots=True)
class PlacedBytes:
    """Bytes that lie on the device, and those that the placement says."""

    weights: int
    kv: int
    planned_weights: int
    planned_kv: int


def check_resident(placement: Placement, spec: ModelSpec) -> None:
    """Raise ConfigError unless all rows of all tensors, all KV and all activations are on the device; `spec` is what a
    rank stores, if there are several.
    """
    if placement.kind == "offload":
        raise ConfigError("the placement is of kind offload, but this runtime runs only resident ones yet.")
    places = {placement.kv_device, placement.activation_device, *(part.device for part in placement.weights)}
    places |= {part.device for part in (*placement.kv, *placement.activations)}
    if places != {DEVICE}:
        raise ConfigError(
            f"this runtime keeps everything on its device, but the placement also names "
            f"{', '.join(sorted(places - {DEVICE}))}; plan for a device that holds the model."
        )
    rows = {part.tensor: (part.start, part.stop, part.format) for part in placement.weights}
    expected = {name: (0, tensor.shape[0], format_name(tensor)) for name, tensor in spec.named_tensors()}
    for name in sorted(rows.keys() | expected.keys()):
        if rows.get(name) != expected.get(name):
            raise ConfigError(
                f"the placement has {_words(rows.get(name))} of {name}, but the model has "
                f"{_words(expected.get(name))}; plan this model again, in the dtype that it runs in."
            )


def _words(part: tuple[int, int, str] | None) -> str:
    return "nothing" if part is None else f"rows {part[0]} to {part[1]} in {part[2]}"


def read_back(placement: Placement, spec: ModelSpec, weights: LoadedWeights, arena: Arena) -> PlacedBytes:
    """What lies there: tensors of the planned shapes in at most the planned bytes, as many slots as planned chunks.

    A format may take fewer bytes than the spec (float32 on the CPU is kept in 16 bits where nothing is lost); the head
    that is tied to the embedding may be a second, packed copy, which counts as placed. Raises IntegrityError.
    """
    specs = dict(spec.named_tensors())
    loaded = dict(_named(weights))
    for name, tensor in specs.items():
        there = loaded.get(name)
        if there is None or _shape(there) != tensor.shape or there.nbytes > tensor.nbytes:
            found = "nothing" if there is None else f"{list(_shape(there))} in {there.nbytes} bytes"
            planned = f"{list(tensor.shape)} in {tensor.nbytes} bytes"
            raise IntegrityError(f"{name} is {found}, but the placement says {planned}")
    if arena.num_slots != placement.num_chunks:
        raise IntegrityError(f"there are {arena.num_slots} slots of KV, but {placement.num_chunks} were planned")
    planned_kv = placement.num_chunks * spec.kv.chunk_nbytes()
    if arena.nbytes < planned_kv:
        raise IntegrityError(f"the arena has {arena.nbytes} bytes, but {planned_kv} were planned")
    return PlacedBytes(weights_nbytes(weights), arena.nbytes, sum(t.nbytes for t in specs.values()), planned_kv)


def _named(weights: LoadedWeights) -> list[tuple[str, Weight]]:
    layers = [(f"layers.{j}.{name}", w) for j, layer in enumerate(weights.layers) for name, w in layer.items()]
    return [*weights.embedding.items(), *layers, *weights.head.items()]


def _shape(weight: Weight) -> tuple[int, ...]:
    return tuple(weight.shape) if isinstance(weight, Tensor) else (weight.out_features, weight.in_features)
