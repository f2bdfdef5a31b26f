"""LSTM cells: over features and over tokens, with any number of layers.

Weights have PyTorch's names (`weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, ... per layer), so that the
state dict of a `torch.nn.LSTM` is a cell's. All layers are one cell, whose state is h and c of every layer:
[hidden] if there is one layer, else [layers, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cellar.ops.linear.weight import LinearWeight
from cellar.ops.recurrent import join_rows, lstm_gates, prepare_gates, product
from cellar.ops.recurrent.lstm import LSTMLayer, pack_lstm
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsOutput, StepsFunction, landing, placed, put, returned

_CARRIED = {1: 0, 2: 1}
"""Of inputs (x or token, h, c) and outputs (h, c)."""


class LSTMStack(nn.Module):
    """The layers of an LSTM without an embedding: `torch.nn.LSTM`'s parameters under their own names."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.has_bias = bias
        bound = 1 / math.sqrt(hidden_size)
        for j in range(num_layers):
            self.register_parameter(
                f"weight_ih_l{j}", _uniform(bound, 4 * hidden_size, input_size if j == 0 else hidden_size)
            )
            self.register_parameter(f"weight_hh_l{j}", _uniform(bound, 4 * hidden_size, hidden_size))
            if bias:
                self.register_parameter(f"bias_ih_l{j}", _uniform(bound, 4 * hidden_size))
                self.register_parameter(f"bias_hh_l{j}", _uniform(bound, 4 * hidden_size))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One step: x: [b, input]; h, c: [b, hidden] or [b, layers, hidden] -> h, c of the same shape."""
        if self.num_layers == 1:
            return self._layer(0, x, h, c)
        new = []
        for j in range(self.num_layers):
            new.append(self._layer(j, x, h[:, j], c[:, j]))
            x = new[-1][0]
        return torch.stack([pair[0] for pair in new], 1), torch.stack([pair[1] for pair in new], 1)

    def _layer(self, j: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.joined(j)
        i, f, g, o = functional.linear(torch.cat((x, h), 1), weight, bias).chunk(4, 1)
        new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * new.tanh(), new

    def joined(self, j: int) -> tuple[Tensor, Tensor | None]:
        """Layer j's two matrices side by side, [4 hidden, input + hidden], and the sum of its two biases."""
        weight = torch.cat((getattr(self, f"weight_ih_l{j}"), getattr(self, f"weight_hh_l{j}")), 1)
        bias = getattr(self, f"bias_ih_l{j}") + getattr(self, f"bias_hh_l{j}") if self.has_bias else None
        return weight, bias

    def packed(self, j: int) -> LSTMLayer:
        """Layer j for the CPU."""
        _, bias = self.joined(j)
        weights = [getattr(self, f"{name}_l{j}").detach() for name in ("weight_ih", "weight_hh")]
        return pack_lstm(weights[0], weights[1], None if bias is None else bias.detach())


class LSTMRows:
    """A stack on a device. Per layer: in float32 on the CPU two products and one kernel of gates that scatters;
    elsewhere one gather, one product, and that kernel.
    """

    def __init__(self, stack: LSTMStack, device: torch.device) -> None:
        layers = range(stack.num_layers)
        prepare_gates("lstm_gates", device, next(stack.parameters()).dtype)
        with torch.no_grad():
            split = device.type == "cpu" and next(stack.parameters()).dtype == torch.float32
            self._split = [stack.packed(j) for j in layers] if split else []
            self._joined = [] if split else [self._on(device, *stack.joined(j)) for j in layers]

    def step(self, x: Rows, h: Rows, c: Rows, h_out: Rows, c_out: Rows) -> tuple[Tensor, Rows]:
        """One step of all layers -> finite [b], and the rows of the last layer's h."""
        several = h.table.dim() == 3
        finite: Tensor | None = None
        for j in range(len(self._split or self._joined)):
            states = [rows.at(j) for rows in (h, c, h_out, c_out)] if several else [h, c, h_out, c_out]
            good = self._layer(j, x, *states)
            finite = good if finite is None else finite & good
            x = states[2]
        assert finite is not None
        return finite, x

    @property
    def single(self) -> LSTMLayer | None:
        """The one layer, in float32 on the CPU; None for several layers, and elsewhere."""
        return self._split[0] if len(self._split) == 1 else None

    def output(self, x: Rows, h: Rows, c: Rows, targets: Sequence[Rows | None]) -> RowsOutput:
        """A step as a cell with the outputs h and c makes it."""
        h_out, c_out = landing(targets[0], h, h.index), landing(targets[1], c, c.index)
        finite, _ = self.step(x, h, c, h_out, c_out)
        return RowsOutput(finite, returned(targets, (h_out, c_out)))

    def with_steps(self, step: RowsFunction, features: Callable[[Rows], Rows]) -> RowsFunction:
        """`step`, of the inputs (x, h, c) and outputs (h, c), and where it is faster several of them in one call.

        `features` makes features of the rows of x.
        """
        layer = self.single
        if layer is None:
            return step

        def run(sources: Sequence[Rows], num_steps: int, targets: Sequence[Rows | None]) -> RowsOutput:
            x, h, c = sources
            inputs = features(x).gather().view(num_steps, len(h.index), -1)
            new_h, new_c, finite = layer.steps(inputs, h.gather(), c.gather())
            return RowsOutput(finite, (put(targets[0], new_h), put(targets[1], new_c)))

        return StepsFunction(step, _CARRIED, run)

    def _layer(self, j: int, x: Rows, h: Rows, c: Rows, h_out: Rows, c_out: Rows) -> Tensor:
        if self._split:
            return self._split[j].step_rows(x.gather(), h, c, h_out, c_out)
        weight, bias = self._joined[j]
        gates, rest = product(join_rows((x.table, h.table), (x.index, h.index)), weight, bias)
        return lstm_gates(gates, c.table, c.index, h_out.table, h_out.index, c_out.table, c_out.index, rest)

    def _on(self, device: torch.device, weight: Tensor, bias: Tensor | None) -> tuple[LinearWeight, Tensor | None]:
        return placed(weight, device), None if bias is None else bias.to(device)


class LSTMCell(LSTMStack):
    """One step of an LSTM over features: (x, h, c) -> (h, c)."""

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows."""
        rows = LSTMRows(self, device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            x, h, c = sources
            return rows.output(x, h, c, targets)

        return rows.with_steps(step, lambda x: x)


class TokenLSTMCell(LSTMStack):
    """One step of an LSTM over tokens, with its embedding: (token, h, c) -> (h, c).

    Beside the stack's names: `embedding.weight` [vocab, input].
    """

    def __init__(
        self, vocab_size: int, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias)
        self.embedding = nn.Embedding(vocab_size, input_size)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """token: [b] int64; h, c as in the stack."""
        return super().forward(self.embedding(token), h, c)

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The step over rows; words are gathered by the kernel that gathers states."""
        rows = LSTMRows(self, device)
        words = self.embedding.weight.detach().to(device)

        def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
            token, h, c = sources
            return rows.output(Rows(words, token.gather()), h, c, targets)

        return rows.with_steps(step, lambda token: Rows(words, token.gather()))


def _uniform(bound: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
