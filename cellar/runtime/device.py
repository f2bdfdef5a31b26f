"""From a device's name to a device that is there."""

from __future__ import annotations

import torch

from cellar.core.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU. Raises DeviceError for a device that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda:0" if count else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= count:
        there = "no CUDA device" if count == 0 else f"only cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0"
        raise DeviceError(f"device {name} is not there, this machine has {there}; use auto or cpu.")
    return torch.device(device.type, index)
