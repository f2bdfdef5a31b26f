"""What the padding baselines compute: a padded batch through the same cells as ours, or through `torch.nn.LSTM`.

Here a batch never changes while it runs, so its states lie in two dense tables that are written by turns.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.cells.padding import Padded
from benchmarks.cells.sentences import Sentences, on_device, on_host
from cellar.ops.recurrent.rows import Rows, RowsFunction

POLL_SECONDS = 20e-6


class Completion:
    """Knows when a device has done what was handed to it; on a CPU that is at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.Event(device)

    def record(self) -> None:
        """Everything so far is what `done` asks about."""
        if self._event is not None:
            self._event.record()

    def done(self, timeout: float) -> bool:
        """True once it is done; waits up to `timeout` seconds."""
        if self._event is None:
            return True
        end = time.perf_counter() + timeout
        while not self._event.query():
            if time.perf_counter() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True


class States:
    """h and c of a padded batch, [batch, hidden] each, before and after a step."""

    def __init__(self, batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = torch.arange(batch, device=device)
        self._before, self._after = (
            [Rows(torch.zeros((batch, hidden), dtype=dtype, device=device), self.index) for _ in range(2)]
            for _ in range(2)
        )

    @property
    def now(self) -> list[Rows]:
        """h and c to read."""
        return self._before

    @property
    def next(self) -> list[Rows]:
        """Where to write them."""
        return self._after

    def swap(self) -> None:
        """What was written is read from now on."""
        self._before, self._after = self._after, self._before


class ChainExecutor:
    """A token LSTM over padded sentences with our cell; answers are the last states of each sentence."""

    def __init__(self, cell: RowsFunction, hidden: int, dtype: torch.dtype, data: Sentences, device: torch.device):
        self._cell = cell
        self._hidden = hidden
        self._dtype = dtype
        self._data = data
        self._device = device
        self._completion = Completion(device)
        self.last: Tensor | None = None

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `last` is its answers [batch, hidden], on the host."""
        tokens, lengths = self._data.padded(batch.requests, batch.length)
        states = States(len(lengths), self._hidden, self._dtype, self._device)
        last = torch.empty((len(lengths), self._hidden), dtype=self._dtype, device=self._device)
        words = on_device(tokens, self._device)
        ends = ending(lengths, self._device)
        for t in range(batch.length):
            self._cell((Rows(words[t], states.index), *states.now), states.next)
            states.swap()
            if (rows := ends.get(t + 1)) is not None:
                last.index_copy_(0, rows, states.now[0].table.index_select(0, rows))
        self.last = on_host(last)
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)


class LibraryChain:
    """The same by `torch.nn.LSTM` (oneDNN, cuDNN): one call for the whole padded batch."""

    def __init__(self, embedding: nn.Embedding, lstm: nn.LSTM, data: Sentences, device: torch.device) -> None:
        self._embedding = embedding
        self._lstm = lstm
        self._data = data
        self._device = device
        self._completion = Completion(device)
        self.last: Tensor | None = None

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `last` is its answers [batch, hidden], on the host."""
        tokens, lengths = self._data.padded(batch.requests, batch.length)
        states, _ = self._lstm(self._embedding(on_device(tokens, self._device)))
        steps, rows = on_device(lengths - 1, self._device), torch.arange(len(lengths), device=self._device)
        self.last = on_host(states[steps, rows])
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)


class TranslateExecutor:
    """Seq2Seq over padded sentences with our cells: all encode, then all decode until the longest answer is there.

    The number of decoding steps is known to nobody before (BatchMaker §2.7.4), so that the bucket is the source's.
    """

    def __init__(
        self,
        encoder: RowsFunction,
        decoder: RowsFunction,
        go: int,
        hidden: int,
        dtype: torch.dtype,
        data: Sentences,
        device: torch.device,
    ) -> None:
        self._encoder = encoder
        self._decoder = decoder
        self._go = go
        self._hidden = hidden
        self._dtype = dtype
        self._data = data
        self._device = device
        self._completion = Completion(device)
        self.tokens: Tensor | None = None

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `tokens` are its answers [steps, batch], on the host."""
        words, lengths = self._data.padded(batch.requests, batch.length)
        tokens = on_device(words, self._device)
        count = len(lengths)
        states = States(count, self._hidden, self._dtype, self._device)
        ends = ending(lengths, self._device)
        encoded = [torch.empty_like(rows.table) for rows in states.now]
        for t in range(batch.length):
            self._encoder((Rows(tokens[t], states.index), *states.now), states.next)
            states.swap()
            if (rows := ends.get(t + 1)) is not None:
                for kept, state in zip(encoded, states.now, strict=True):
                    kept.index_copy_(0, rows, state.table.index_select(0, rows))
        for kept, state in zip(encoded, states.now, strict=True):
            state.table.copy_(kept)
        steps = max(self._data.target(request) for request in batch.requests)
        made = torch.empty((steps + 1, count), dtype=torch.int64, device=self._device)
        made[0] = self._go
        for t in range(steps):
            targets = [Rows(made[t + 1], states.index), *states.next]
            self._decoder((Rows(made[t], states.index), *states.now), targets)
            states.swap()
        self.tokens = on_host(made[1:])
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)


class LibraryTranslate:
    """The same by `torch.nn.LSTM`: one call to encode, one a step to decode."""

    def __init__(
        self,
        source: nn.Embedding,
        encoder: nn.LSTM,
        target: nn.Embedding,
        decoder: nn.LSTM,
        output: nn.Linear,
        go: int,
        data: Sentences,
        device: torch.device,
    ) -> None:
        self._source, self._encoder = source, encoder
        self._target, self._decoder, self._output = target, decoder, output
        self._go = go
        self._data = data
        self._device = device
        self._completion = Completion(device)
        self.tokens: Tensor | None = None

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `tokens` are its answers [steps, batch], on the host."""
        words, lengths = self._data.padded(batch.requests, batch.length)
        inputs = self._source(on_device(words, self._device))
        # Packed, so that the states are those at each sentence's own end; it wants descending lengths.
        order = np.argsort(-lengths, kind="stable")
        packed = nn.utils.rnn.pack_padded_sequence(
            inputs[:, on_device(order, self._device)], torch.from_numpy(lengths[order])
        )
        _, state = self._encoder(packed)
        steps = max(self._data.target(request) for request in batch.requests)
        token = torch.full((len(lengths),), self._go, device=self._device)
        made = []
        for _ in range(steps):
            x, state = self._decoder(self._target(token)[None], state)
            token = self._output(x[0]).argmax(1)
            made.append(token)
        sorted_back = torch.empty((steps, len(lengths)), dtype=torch.int64, device=self._device)
        sorted_back[:, on_device(order, self._device)] = torch.stack(made)
        self.tokens = on_host(sorted_back)
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)


def ending(lengths: NDArray[np.int64], device: torch.device) -> dict[int, Tensor]:
    """Length -> the rows of a batch that have it."""
    return {int(length): on_device(np.flatnonzero(lengths == length), device) for length in np.unique(lengths)}
