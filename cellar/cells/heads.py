"""Heads: cells that make an answer of a hidden state; of a state of several layers, of its last one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cellar.ops.linear.definition import linear
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, finite_rows, placed, put


def top(h: Tensor) -> Tensor:
    """The last layer of a state: [b, hidden] as it is, [b, layers, hidden] -> [b, hidden]."""
    return h[:, -1] if h.dim() == 3 else h


def top_rows(h: Rows) -> Tensor:
    """The last layer's state, gathered."""
    return (h.at(h.table.shape[1] - 1) if h.table.dim() == 3 else h).gather()


class Projection:
    """A linear layer on a device, packed."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        self._weight = placed(layer.weight, device)
        self._bias = None if layer.bias is None else layer.bias.detach().to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [b, in] -> [b, out]."""
        return linear(x, self._weight, self._bias)


class ClassifierHead(nn.Linear):
    """(h) -> (label, logits): the best class, int64 [], and the logits [classes]."""

    def __init__(self, hidden_size: int, num_classes: int, bias: bool = True) -> None:
        super().__init__(hidden_size, num_classes, bias)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """h: [b, hidden] or [b, layers, hidden]."""
        logits = super().forward(top(h))
        return logits.argmax(1), logits

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The head over rows."""
        project = Projection(self, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            logits = project(top_rows(sources[0]))
            return RowsOutput(finite_rows(logits), (put(targets[0], logits.argmax(1)), put(targets[1], logits)))

        return step


class TokenHead(nn.Linear):
    """(h) -> (token): the token of the largest logit, int64 []."""

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = True) -> None:
        super().__init__(hidden_size, vocab_size, bias)

    def forward(self, h: Tensor) -> Tensor:
        """h: [b, hidden] or [b, layers, hidden]."""
        return super().forward(top(h)).argmax(1)

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The head over rows."""
        project = Projection(self, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            token, finite = best_token(project(top_rows(sources[0])))
            return RowsOutput(finite, (put(targets[0], token),))

        return step


class ScoreHead(nn.Linear):
    """(h, token) -> (logprob): the log-probability, float32 [], of a token after the state h."""

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = True) -> None:
        super().__init__(hidden_size, vocab_size, bias)

    def forward(self, h: Tensor, token: Tensor) -> Tensor:  # type: ignore[override]
        """h: [b, hidden] or [b, layers, hidden]; token: [b] int64."""
        return _log_probability(super().forward(top(h)), token)

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The head over rows."""
        project = Projection(self, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            h, token = sources
            score = _log_probability(project(top_rows(h)), token.gather())
            return RowsOutput(finite_rows(score), (put(targets[0], score),))

        return step


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [b, vocab] -> the best token [b], and whether the row is sound [b]."""
    # The largest of a row with NaN is NaN, in NumPy as in torch. On the CPU NumPy finds it in a tenth of the time.
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        array = logits.numpy()
        token = array.argmax(axis=1)
        return torch.from_numpy(token), torch.from_numpy(np.isfinite(array[np.arange(len(array)), token]))
    best = logits.max(1)
    return best.indices, best.values.isfinite()


def _log_probability(logits: Tensor, token: Tensor) -> Tensor:
    return -functional.cross_entropy(logits.float(), token, reduction="none")
