"""Sentences as requests: tokens of every one, and how a batch of them is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.messages import IntArray


@dataclass(frozen=True)
class Sentences:
    """A pool of sentences; request number k is sentence k modulo their number.

    tokens int64 [all], sentence s at [offsets[s], offsets[s + 1]); `targets` are lengths to decode to, or None.
    """

    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    targets: IntArray | None = None

    @classmethod
    def random(
        cls, lengths: IntArray, vocab_size: int, rng: np.random.Generator, targets: IntArray | None = None
    ) -> Sentences:
        """Random words in sentences of the given lengths."""
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(rng.integers(1, vocab_size, int(offsets[-1])), offsets, targets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def length(self, request: int) -> int:
        """Words of a request."""
        s = request % len(self)
        return int(self.offsets[s + 1] - self.offsets[s])

    def words(self, request: int) -> NDArray[np.int64]:
        """Tokens of a request."""
        s = request % len(self)
        return self.tokens[self.offsets[s] : self.offsets[s + 1]]

    def target(self, request: int) -> int:
        """Steps that a request's answer takes."""
        assert self.targets is not None
        return int(self.targets[request % len(self)])

    def padded(self, requests: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """tokens [length, batch], 0 behind the end of a sentence, and lengths [batch]."""
        s = np.asarray(requests) % len(self)
        starts = self.offsets[s]
        lengths = self.offsets[s + 1] - starts
        steps = np.arange(length)[:, None]
        places = np.minimum(starts + steps, len(self.tokens) - 1)
        return np.where(steps < lengths, self.tokens[places], 0), lengths


def on_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on the device; from a CPU the copy to another device is not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, complete when the device has come so far; of a CPU's tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
