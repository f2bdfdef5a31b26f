"""What a GPU has room for: tiles are cut to it before they are tried, on any machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from cellar.ops.triton_support import triton_available

# Bytes of shared memory that one program may have, by architecture: NVIDIA's compute capability, AMD's name.
SHARED_MEMORY: Mapping[int | str, int] = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    "gfx90a": 65_536,
    "gfx942": 65_536,
    "gfx950": 163_840,
    "gfx1100": 65_536,
    "gfx1200": 65_536,
}


@dataclass(frozen=True, slots=True)
class Room:
    """What a device has for one program.

    shared: bytes of shared memory. warps: the most of them. keeps_all_stages: tensor cores read all
    stages of a pipeline from shared memory (Hopper); elsewhere the turn at hand is in registers, and one stage less is
    kept.
    """

    shared: int
    warps: int = 32
    keeps_all_stages: bool = False


def room_on(architecture: int | str) -> Room:
    """Of a device that is not here: NVIDIA's compute capability, or AMD's name. Raises KeyError for unknown ones."""
    # AMD's data center GPUs have 64 threads a warp, and 1,024 a program as all have.
    warps = 16 if isinstance(architecture, str) and architecture.startswith("gfx9") else 32
    return Room(SHARED_MEMORY[architecture], warps, keeps_all_stages=architecture == 90)


@functools.cache
def room_of(device: torch.device) -> Room:
    """Of this device; the most there is for one that is no GPU, where kernels are interpreted or only listed."""
    if device.type != "cuda":
        return room_on(90)
    from triton.runtime.driver import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(device)
    shared = int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    return Room(shared, 1024 // properties.warp_size, keeps_all_stages=is_hopper)


def is_out_of_resources(error: Exception) -> bool:
    """True for what Triton raises where a device lacks the shared memory, registers or threads that a launch asks."""
    if not triton_available():
        return False
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)


class Sizes(Protocol):
    """Sizes of a kernel, of which there may be smaller ones."""

    def smaller(self) -> Self | None:
        """The next to try where a device refuses these; None: no smaller ones."""
        ...


AnySizes = TypeVar("AnySizes", bound=Sizes)


def in_room(launch: Callable[[AnySizes], Tensor], sizes: AnySizes) -> Tensor | None:
    """What a launch gives with these sizes, or the first smaller ones that the device accepts; None: with none."""
    tried: AnySizes | None = sizes
    while tried is not None:
        try:
            return launch(tried)
        except Exception as error:
            if not is_out_of_resources(error):
                raise
            tried = tried.smaller()
    return None
