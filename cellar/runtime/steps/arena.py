"""The KV arena: all slots of a model's cache in one allocation per layer group, and how many of them there are.

On an accelerator a slot is contiguous, so that a chunk with all its layers is one copy to another tier:

    [slot][layer][K/V][KV head][token of the chunk][head_dim]

(where K and V are quantized: [KV head][codes of all tokens, then their scales], so that scales go wherever codes do).
On the CPU a layer is contiguous, so that the keys of one layer lie close together and are read in one sweep:

    [layer][K/V][slot][KV head][token of the chunk][head_dim]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from cellar.core.config import CacheConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.specs import KVGroup, KVSpec
from cellar.runtime.memory import GIB, device_total, human
from cellar.runtime.pages import zeros

CPU_CACHE_LIMIT = 4 * GIB
CPU_CACHE_SHARE = 0.25

# What says the format to operations (`ops/kv_format.py`).
_QUANTIZED: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int4": torch.uint8}

# Large allocations of torch's allocator are multiples of this.
_SEGMENT = 2**21
_MOST_SHARE = 0.98


class Arena:
    """`k[j]` and `v[j]`: layer j's cache, [num_slots, kv_heads, chunk_size, head_dim], strided views of one buffer; the
    last dimension is a row's bytes, scales included, if K and V are quantized (`ops/kv_format.py`).

    Slot n of every group belongs to chunk n: a chunk has the same number in all groups. All zero at first, so
    that whatever a kernel reads beyond a context is finite. `memory` gives a CPU's arena so many bytes of zeros;
    without it the system does.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, device: torch.device, memory: Callable[[int], Tensor] | None = None
    ) -> None:
        unknown = sorted({group.kind for group in spec.groups} - {"full", "window"})
        if unknown:
            raise ConfigError(f"layer groups of kind {', '.join(unknown)} have no arena; full and window have one.")
        num_layers = 1 + max(j for group in spec.groups for j in group.layers)
        self.num_slots = num_slots
        self.chunk_size = spec.chunk_size
        self._groups = spec.groups
        self._by_layer = device.type == "cpu"
        self.buffers = [_buffer(group, spec.chunk_size, num_slots, device, memory or _zeros) for group in spec.groups]
        self.k, self.v = self._views(num_layers)

    def seen(self, buffers: Sequence[Tensor]) -> Arena:
        """The same chunks, whose buffers another device sees as these."""
        other = copy(self)
        other.buffers = list(buffers)
        other.k, other.v = other._views(len(self.k))
        return other

    def _views(self, num_layers: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        k: list[Tensor | None] = [None] * num_layers
        v: list[Tensor | None] = [None] * num_layers
        for group, buffer in zip(self._groups, self.buffers, strict=True):
            for n, j in enumerate(group.layers):
                k[j], v[j] = buffer[n] if self._by_layer else buffer[:, n].unbind(1)
        keys, values = [x for x in k if x is not None], [x for x in v if x is not None]
        if len(keys) != num_layers:
            raise ConfigError("a layer belongs to no group of the KV cache; each must belong to exactly one.")
        return keys, values

    @property
    def layers(self) -> Sequence[Sequence[int]]:
        """Of each buffer, whose layers it holds."""
        return [group.layers for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


def cache_type(dtype: str) -> torch.dtype:
    """The type of the elements of a cache that a spec names (`KVGroup.dtype`)."""
    found: torch.dtype = _QUANTIZED.get(dtype) or getattr(torch, dtype)
    return found


def _buffer(
    group: KVGroup, chunk_size: int, num_slots: int, device: torch.device, memory: Callable[[int], Tensor]
) -> Tensor:
    dtype = cache_type(group.dtype)
    inner = (group.num_kv_heads, chunk_size, group.row_nbytes // dtype.itemsize)
    if device.type != "cpu":
        # One slot more than there are: what pads a captured step is written there.
        shape = (num_slots + 1, len(group.layers), 2, *inner)
        size = int(np.prod(shape))
        # Whole segments of the allocator. In what is left of one it would place small tensors, and a single one that
        # outlives the model keeps all of the segment from being given back.
        whole = -(-size * dtype.itemsize // _SEGMENT) * _SEGMENT // dtype.itemsize
        return torch.zeros(whole, dtype=dtype, device=device)[:size].view(shape)
    shape = (len(group.layers), 2, num_slots, *inner)
    return memory(int(np.prod(shape)) * dtype.itemsize).view(dtype).view(shape)


def _zeros(nbytes: int) -> Tensor:
    """Zero pages, which the system hands out when they are first touched: a large arena costs nothing until then."""
    return torch.from_numpy(zeros(nbytes))


def cpu_cache_nbytes(cache: CacheConfig, available: int, ranks: int = 1) -> int:
    """Bytes of KV cache on a host with `available` bytes left: as asked for, or min(4 GiB, a quarter of them) in all.

    `ranks` of them share the host; what is asked for is each one's.

    Raises CapacityError if more is asked for than there is.
    """
    requested = cache.kv_cache_memory_bytes
    if requested is None:
        return int(min(CPU_CACHE_LIMIT, CPU_CACHE_SHARE * available)) // ranks
    if requested > available:
        raise CapacityError(
            f"kv_cache_memory_bytes is {requested} ({human(requested)}), but only {human(available)} of memory are "
            "free; lower it."
        )
    return requested


def device_cache_nbytes(cache: CacheConfig, used: int, device: torch.device) -> int:
    """Bytes of KV cache on an accelerator on which `used` bytes are taken: weights, a step's buffers, other processes.

    Raises CapacityError if more is asked for than there is, or nothing is left.
    """
    total = device_total(device)
    requested = cache.kv_cache_memory_bytes
    if requested is not None:
        if requested > total - used:
            raise CapacityError(
                f"kv_cache_memory_bytes is {requested} ({human(requested)}), but of the {human(total)} of {device} "
                f"only {human(total - used)} are free beside weights and buffers; lower it."
            )
        return requested
    left = int(total * cache.gpu_memory_utilization) - used
    if left <= 0:
        share = used / total
        raised = f"raise it above {share:.2f}, " if share < _MOST_SHARE else ""
        raise CapacityError(
            f"weights, buffers and other processes take {human(used)} of {device}, but gpu_memory_utilization "
            f"{cache.gpu_memory_utilization:g} allows {human(total * cache.gpu_memory_utilization)} with the KV cache; "
            f"{raised}lower max_num_batched_tokens, end other processes, or take a smaller or quantized model."
        )
    return left


def what_decides(cache: CacheConfig, device: torch.device) -> str:
    """The option that gives the KV cache more memory on a device."""
    if device.type == "cpu" or cache.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    return "gpu_memory_utilization"


def num_slots(spec: KVSpec, nbytes: int, max_model_len: int, option: str) -> int:
    """How many slots fit into `nbytes`, which `option` decides.

    Raises CapacityError if one request of `max_model_len` tokens would not fit, saying which length would.
    """
    slots = nbytes // spec.chunk_nbytes()
    needed = -(-max_model_len // spec.chunk_size)
    if slots >= needed:
        return slots
    needs = f"one request of max_model_len {max_model_len} needs {human(needed * spec.chunk_nbytes())} of KV cache"
    if slots == 0:
        raise CapacityError(
            f"{needs} and one chunk {human(spec.chunk_nbytes())}, but there are {human(nbytes)}; raise {option}."
        )
    raise CapacityError(
        f"{needs}, but there are {human(nbytes)}; lower max_model_len to at most {slots * spec.chunk_size}, "
        f"or raise {option}."
    )
