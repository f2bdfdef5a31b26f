"""A layer of an LSTM on the CPU. Several steps may be one call: the inputs' products of all steps are then one.

A gate is the input's product with its bias, then the state's product added to it, then the kernel of gates: the same
sums in the same order for one step or several, and for any number of rows. (oneDNN's own LSTM blocks its sums by the
number of rows, docs/log/cells.md.) On an accelerator both products are one (`cells/lstm.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.ops.linear.weight import LinearWeight
from cellar.ops.recurrent import lstm_gates
from cellar.ops.recurrent.rows import Rows, placed

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LSTMLayer:
    """from_x [4 hidden, input], from_h [4 hidden, hidden], bias [4 hidden] (both of PyTorch's added) or None."""

    from_x: LinearWeight
    from_h: LinearWeight
    bias: Tensor | None

    def step_rows(self, x: Tensor, h: Rows, c: Rows, h_out: Rows, c_out: Rows) -> Tensor:
        """One step: x: [b, input], states by rows of tables -> finite [b]."""
        gates = self.from_x.multiply(x, self.bias)
        return self._finish(gates, h.gather(), c, h_out, c_out)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step: x: [b, input]; h, c: [b, hidden] -> h, c of the next step, finite [b]."""
        return self.steps(x[None], h, c)

    def steps(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Some steps: x: [steps, b, input]; h, c: [b, hidden] -> h, c after the last, finite [b] of it.

        A state that is not finite once is not finite at the end.
        """
        count, batch = x.shape[:2]
        gates = self.from_x.multiply(x.flatten(0, 1), self.bias).view(count, batch, -1)
        index = torch.arange(batch)
        fresh = [(torch.empty_like(h), torch.empty_like(c)) for _ in range(min(count, 2))]
        finite = index == index
        for t in range(count):
            h_new, c_new = fresh[t & 1]
            finite = self._finish(gates[t], h, Rows(c, index), Rows(h_new, index), Rows(c_new, index))
            h, c = h_new, c_new
        return h, c, finite

    def _finish(self, gates: Tensor, h: Tensor, c: Rows, h_out: Rows, c_out: Rows) -> Tensor:
        gates += self.from_h.multiply(h)
        return lstm_gates(gates, c.table, c.index, h_out.table, h_out.index, c_out.table, c_out.index)


def pack_lstm(weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None) -> LSTMLayer:
    """The layer with both matrices packed."""
    return LSTMLayer(placed(weight_ih, _CPU), placed(weight_hh, _CPU), bias)
