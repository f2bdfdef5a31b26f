"""GRU cells: over features and over tokens, with any number of layers.

Weights have PyTorch's names, so that the state dict of a `torch.nn.GRU` is a cell's. The state is h of every layer:
[hidden] if there is one layer, else [layers, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cellar.ops.linear.weight import LinearWeight
from cellar.ops.recurrent import gru_gates, join_rows, prepare_gates, product
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, landing, placed, returned


class GRUStack(nn.Module):
    """The layers of a GRU without an embedding: `torch.nn.GRU`'s parameters under their own names."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.has_bias = bias
        bound = 1 / math.sqrt(hidden_size)
        for j in range(num_layers):
            for kind, width in (("ih", hidden_size if j else input_size), ("hh", hidden_size)):
                weight = torch.empty(3 * hidden_size, width).uniform_(-bound, bound)
                self.register_parameter(f"weight_{kind}_l{j}", nn.Parameter(weight))
                if bias:
                    vector = torch.empty(3 * hidden_size).uniform_(-bound, bound)
                    self.register_parameter(f"bias_{kind}_l{j}", nn.Parameter(vector))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step: x: [b, input]; h: [b, hidden] or [b, layers, hidden] -> h of the same shape."""
        if self.num_layers == 1:
            return self._layer(0, x, h)
        new = []
        for j in range(self.num_layers):
            x = self._layer(j, x, h[:, j])
            new.append(x)
        return torch.stack(new, 1)

    def _layer(self, j: int, x: Tensor, h: Tensor) -> Tensor:
        from_x = functional.linear(x, *self.side("ih", j)).chunk(3, 1)
        from_h = functional.linear(h, *self.side("hh", j)).chunk(3, 1)
        r, z = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
        return torch.lerp((from_x[2] + r * from_h[2]).tanh(), h, z)

    def side(self, kind: str, j: int) -> tuple[Tensor, Tensor | None]:
        """Weight [3 hidden, ...] and bias of layer j for its input ("ih") or its state ("hh")."""
        weight: Tensor = getattr(self, f"weight_{kind}_l{j}")
        return weight, getattr(self, f"bias_{kind}_l{j}") if self.has_bias else None


class GRURows:
    """A stack on a device: per layer two gathers, two matrix products, one kernel of gates that scatters."""

    def __init__(self, stack: GRUStack, device: torch.device) -> None:
        def side(kind: str, j: int) -> tuple[LinearWeight, Tensor | None]:
            weight, bias = stack.side(kind, j)
            return placed(weight, device), None if bias is None else bias.detach().to(device)

        prepare_gates("gru_gates", device, next(stack.parameters()).dtype)
        self._layers = [(side("ih", j), side("hh", j)) for j in range(stack.num_layers)]

    def output(self, x: Rows, h: Rows, targets: Sequence[Rows | None]) -> RowsOutput:
        """One step of all layers, as a cell with the output h makes it."""
        h_out = landing(targets[0], h, h.index)
        several = len(self._layers) > 1
        finite: Tensor | None = None
        for j, (from_x, from_h) in enumerate(self._layers):
            before, after = (h.at(j), h_out.at(j)) if several else (h, h_out)
            x_gates, x_rest = product(join_rows((x.table,), (x.index,)), *from_x)
            h_gates, h_rest = product(join_rows((before.table,), (before.index,)), *from_h)
            old, new = (before.table, before.index), (after.table, after.index)
            good = gru_gates(x_gates, h_gates, *old, *new, x_rest, h_rest)
            finite = good if finite is None else finite & good
            x = after
        assert finite is not None
        return RowsOutput(finite, returned(targets, (h_out,)))


class GRUCell(GRUStack):
    """One step of a GRU over features: (x, h) -> (h)."""

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows."""
        rows = GRURows(self, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            x, h = sources
            return rows.output(x, h, targets)

        return step


class TokenGRUCell(GRUStack):
    """One step of a GRU over tokens, with its embedding: (token, h) -> (h).

    Beside the stack's names: `embedding.weight` [vocab, input].
    """

    def __init__(
        self, vocab_size: int, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias)
        self.embedding = nn.Embedding(vocab_size, input_size)

    def forward(self, token: Tensor, h: Tensor) -> Tensor:
        """token: [b] int64; h as in the stack."""
        return super().forward(self.embedding(token), h)

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows."""
        rows = GRURows(self, device)
        words = self.embedding.weight.detach().to(device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            token, h = sources
            return rows.output(Rows(words, token.gather()), h, targets)

        return step
