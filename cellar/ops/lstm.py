"""A whole step of an LSTM's layer on gathered rows: the CPU's way, where one primitive does products and gates.

oneDNN's LSTM, asked for a sequence of one step and given weights that are packed once, takes as long as the matrix
product alone (docs/log/cells.md). On an accelerator the step is three kernels (`recurrent.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.registry import Case, Op

# The primitive's name for an LSTM (gates in PyTorch's order).
_LSTM_MODE = 2
# It has one layout of weights for a single row, and one for any number of rows from 2 on.
_ONE, _MANY = 1, 64
# Both directions, batch first, training.
_NO_OPTIONS = (False, False, False)


@dataclass(frozen=True, slots=True)
class LSTMWeights:
    """One layer: weight_ih [4 hidden, input], weight_hh [4 hidden, hidden], biases [4 hidden], in PyTorch's order.

    `one` and `many`: both matrices packed for one row, and for more; None where that is not to be had.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    one: tuple[Tensor, Tensor] | None = None
    many: tuple[Tensor, Tensor] | None = None


def pack_lstm(weights: LSTMWeights) -> LSTMWeights:
    """The weights with their packed forms, in float32 on a CPU that has oneDNN; else as they are."""
    plain = weights.weight_ih
    if plain.is_cuda or plain.dtype != torch.float32 or not _packs():
        return weights
    return LSTMWeights(
        weights.weight_ih,
        weights.weight_hh,
        weights.bias_ih,
        weights.bias_hh,
        one=_packed(weights, _ONE),
        many=_packed(weights, _MANY),
    )


def lstm_step(x: Tensor, h: Tensor, c: Tensor, weights: LSTMWeights) -> tuple[Tensor, Tensor]:
    """One step: x: [b, input]; h, c: [b, hidden] -> h, c of the next step.

    With packed weights the last bits of a row may depend on how many rows there are: the primitive blocks its products
    by their number.
    """
    packed = weights.one if len(x) == 1 else weights.many
    if packed is None or not len(x):
        return lstm_step_definition(x, h, c, weights)
    hidden = h.shape[1]
    return _primitive(x, h, c, packed, weights.bias_ih, weights.bias_hh, hidden)


def lstm_steps(x: Tensor, h: Tensor, c: Tensor, weights: LSTMWeights) -> tuple[Tensor, Tensor]:
    """Some steps in one call, for packed weights: x: [steps, b, input]; h, c: [b, hidden] -> h, c after the last.

    What `lstm_step` gives again and again, but for the last bits.
    """
    packed = weights.one if len(h) == 1 else weights.many
    assert packed is not None
    hidden = h.shape[1]
    found: Any = torch.ops.aten.mkldnn_rnn_layer.default(
        x, *packed, weights.bias_ih, weights.bias_hh, h, c, False, [], _LSTM_MODE, hidden, 1, True, *_NO_OPTIONS
    )
    return found[0][-1], found[2].view(c.shape)


def lstm_step_definition(x: Tensor, h: Tensor, c: Tensor, weights: LSTMWeights) -> tuple[Tensor, Tensor]:
    """The step in plain torch, in float32 (Hochreiter and Schmidhuber 1997).

    i, f, g, o = x W_ih^T + b_ih + h W_hh^T + b_hh
    c' = sigmoid(f) * c + sigmoid(i) * tanh(g);  h' = sigmoid(o) * tanh(c')
    """
    gates = functional.linear(x.float(), weights.weight_ih.float(), weights.bias_ih.float())
    gates += functional.linear(h.float(), weights.weight_hh.float(), weights.bias_hh.float())
    i, f, g, o = gates.chunk(4, 1)
    new = f.sigmoid() * c.float() + i.sigmoid() * g.tanh()
    return (o.sigmoid() * new.tanh()).to(h.dtype), new.to(c.dtype)


def _primitive(
    x: Tensor, h: Tensor, c: Tensor, packed: tuple[Tensor, Tensor], bias_ih: Tensor, bias_hh: Tensor, hidden: int
) -> tuple[Tensor, Tensor]:
    """The sequence [1, b, input]; the rest of the arguments: not reversed, no lengths, one layer, with biases, one
    direction, time first, no training."""
    found: Any = torch.ops.aten.mkldnn_rnn_layer.default(
        x[None], *packed, bias_ih, bias_hh, h, c, False, [], _LSTM_MODE, hidden, 1, True, False, False, False
    )
    return found[0][0], found[2].view(c.shape)


def _packed(weights: LSTMWeights, rows: int) -> tuple[Tensor, Tensor]:
    hidden, width = weights.weight_hh.shape[1], weights.weight_ih.shape[1]
    first, second = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight.default(
        weights.weight_ih.contiguous(), weights.weight_hh.contiguous(), hidden, False, True, False, [1, rows, width]
    )
    return first, second


@functools.cache
def _packs() -> bool:
    """True if this build has the primitive and it does what the definition does, for one row and for several."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    arguments = _arguments(3, 4, 5, torch.device("cpu"), torch.float32)
    x, h, c, weights = arguments["x"], arguments["h"], arguments["c"], arguments["weights"]
    try:
        for rows in (1, 3):
            packed = _packed(weights, _ONE if rows == 1 else _MANY)
            got = _primitive(x[:rows], h[:rows], c[:rows], packed, weights.bias_ih, weights.bias_hh, 5)
            wanted = lstm_step_definition(x[:rows], h[:rows], c[:rows], weights)
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True)):
                return False
    except (RuntimeError, AttributeError):
        return False
    return True


def _arguments(b: int, width: int, hidden: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(b)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    weights = LSTMWeights(rows(4 * hidden, width) / 4, rows(4 * hidden, hidden) / 4, rows(4 * hidden), rows(4 * hidden))
    return {"x": rows(b, width), "h": rows(b, hidden), "c": rows(b, hidden), "weights": weights}


def _case(name: str, b: int, width: int, hidden: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        found = _arguments(b, width, hidden, device, dtype)
        return {**found, "weights": pack_lstm(found["weights"])}

    return Case(name, make)


OPS = (
    Op(
        "lstm_step",
        lstm_step,
        lstm_step_definition,
        None,
        (_case("one row", 1, 20, 12), _case("some rows", 5, 7, 33), _case("many rows", 70, 16, 16)),
    ),
)
