"""Which tokens a row's prompt has and how often its output has each: kept only for rows with penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cellar.runtime.steps.inputs import LongArray

_FIRST = 4


class TokenCounts:
    """`prompt` bool [slots, vocab] and `output` int32 [slots, vocab]; a row that needs one has one of the slots.

    Begins empty and doubles when a row finds no slot: five bytes per word of the vocabulary and slot.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slot_of_row = np.full(num_rows, -1, np.int64)
        self._free: list[int] = []

    def open(self, row: int, prompt: Tensor, output: Tensor) -> None:
        """Give `row` a slot and count its tokens so far. prompt, output: int64 ids."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of_row[row] = slot
        self.prompt[slot].zero_().index_fill_(0, prompt, True)
        self.output[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def release(self, row: int) -> None:
        """The row's slot is free; a row without one is ignored."""
        slot = int(self._slot_of_row[row])
        if slot >= 0:
            self._free.append(slot)
            self._slot_of_row[row] = -1

    def slots(self, rows: LongArray) -> LongArray:
        """The slots of rows."""
        return self._slot_of_row[rows]

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """One more of tokens[i] in slot slots[i]; slots are distinct."""
        places = slots * self.output.shape[1] + tokens
        self.output.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _grow(self) -> None:
        old, vocab = self.output.shape
        size = max(_FIRST, 2 * old)
        prompt, output = self.prompt.new_zeros((size, vocab)), self.output.new_zeros((size, vocab))
        prompt[:old], output[:old] = self.prompt, self.output
        self.prompt, self.output = prompt, output
        self._free = list(range(size - 1, old - 1, -1))
