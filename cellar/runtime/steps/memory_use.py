"""The memory plan of a model that has been opened: what its parts take, and what the system counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cellar.models.loader import LoadedWeights
from cellar.ops.linear.weight import Weight
from cellar.runtime.memory import device_used, human, resident
from cellar.runtime.steps.arena import Arena


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. `weights` and `kv` lie on the device, `host_kv` in the host's memory.

    `taken` is what the system counts more than before the model was opened: memory of this process on a CPU, where
    pages of `kv` count from when they are first written, and those of `host_kv` from when they are taken, beside the
    start; on an accelerator memory of the device.
    """

    device: str
    weights: int
    kv: int
    num_chunks: int
    host_kv: int
    taken: int

    def line(self) -> str:
        """In one line, for people."""
        host = f", host KV {human(self.host_kv)}" if self.host_kv else ""
        said = "this process grew by" if self.device == "cpu" else "the device counts"
        later = ", KV counts when it is written" if self.device == "cpu" else ""
        return (
            f"memory on {self.device}: weights {human(self.weights)}, KV {human(self.kv)} in {self.num_chunks:,} "
            f"chunks{host}; {said} {human(self.taken)}{later}."
        )


def weights_nbytes(weights: LoadedWeights) -> int:
    """Bytes of the weights as they lie in memory; a matrix that has two names counts once."""
    unique: dict[int, Weight] = {}
    for part in (weights.embedding, *weights.layers, weights.head):
        unique.update((id(weight), weight) for weight in part.values())
    return sum(weight.nbytes for weight in unique.values())


def counted(device: torch.device) -> int:
    """Bytes that the system counts now: of this process on a CPU, else of anyone on the device."""
    return resident() if device.type == "cpu" else device_used(device)


def memory_use(
    weights: LoadedWeights, arena: Arena, host_kv: int, device: torch.device, counted_before: int
) -> MemoryUse:
    """What was opened, beside what the system counts since."""
    taken = max(0, counted(device) - counted_before)
    return MemoryUse(str(device), weights_nbytes(weights), arena.nbytes, arena.num_slots, host_kv, taken)
