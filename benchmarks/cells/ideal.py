"""The ideal line: a graph for inputs that are all alike, written out by hand, with nothing to schedule or gather."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cells.padded import Completion, States
from benchmarks.cells.padding import Padded
from benchmarks.cells.sentences import Sentences, on_device, on_host
from benchmarks.cells.trees import Tree, vocabulary
from cellar.ops.recurrent.rows import Rows, RowsFunction
from cellar.runtime.captured import captured


class FixedChain:
    """Sentences of one length through a token LSTM: all steps of a full batch are one piece of work.

    A smaller batch takes as long as a full one; at saturation there is none.
    """

    def __init__(
        self,
        cell: RowsFunction,
        hidden: int,
        batch: int,
        dtype: torch.dtype,
        data: Sentences,
        device: torch.device,
    ) -> None:
        self._cell = cell
        self._data = data
        self._device = device
        self._length = data.length(0)
        self._words = torch.zeros((self._length, batch), dtype=torch.int64, device=device)
        self._states = States(batch, hidden, dtype, device)
        self._completion = Completion(device)
        self.last: Tensor | None = None
        with torch.inference_mode():
            self._run = captured(self._steps, device)

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `last` is its answers [batch, hidden], on the host."""
        tokens, lengths = self._data.padded(batch.requests, batch.length)
        self._words[:, : len(lengths)].copy_(on_device(tokens, self._device))
        self._run()
        self.last = on_host(self._states.now[0].table[: len(lengths)])
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)

    def _steps(self) -> None:
        states = self._states
        for rows in states.now:
            rows.table.zero_()
        for words in self._words:
            self._cell((Rows(words, states.index), *states.now), states.next)
            states.swap()
        if self._length % 2:  # the answer must lie where it lay when this was recorded
            for new, old in zip(states.now, states.next, strict=True):
                old.table.copy_(new.table)
            states.swap()


class FixedTree:
    """Trees of one form through a binary TreeLSTM: its cells one after the other, each for a full batch of trees."""

    def __init__(
        self,
        leaf: RowsFunction,
        inner: RowsFunction,
        tree: Tree,
        hidden: int,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._leaf = leaf
        self._inner = inner
        self._tree = tree
        self._device = device
        number = vocabulary([tree])
        self._number = [0 if word is None else number[word] for word in tree.words]
        index = torch.arange(batch, device=device)
        # One table for all nodes, as a bank has them: node k of tree n lies in row k * batch + n.
        tables = [torch.zeros((len(tree.words) * batch, hidden), dtype=dtype, device=device) for _ in range(2)]
        self._states = [[Rows(table, index + k * batch) for table in tables] for k in range(len(tree.words))]
        self._tokens = [Rows(torch.full((batch,), token, device=device), index) for token in self._number]
        self._batch = batch
        self._completion = Completion(device)
        self.last: Tensor | None = None
        with torch.inference_mode():
            self._run = captured(self._nodes, device)

    @torch.inference_mode()
    def start(self, batch: Padded) -> None:
        """Run the batch; `last` is its answers [batch, hidden], on the host."""
        self._run()
        table, first = self._states[-1][0].table, (len(self._states) - 1) * self._batch
        self.last = on_host(table[first : first + len(batch.requests)])
        self._completion.record()

    def done(self, timeout: float) -> bool:
        """True once the answers are there."""
        return self._completion.done(timeout)

    def _nodes(self) -> None:
        for k, children in enumerate(self._tree.children):
            if children:
                left, right = (self._states[child] for child in children)
                self._inner((left[0], right[0], left[1], right[1]), self._states[k])
            else:
                self._leaf((self._tokens[k],), self._states[k])
