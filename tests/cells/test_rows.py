"""Every built-in cell over rows against its own `forward`; the cells against torch.nn and the paper's sums."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cellar.cells.gru import GRUCell, TokenGRUCell
from cellar.cells.heads import ClassifierHead, ScoreHead, TokenHead
from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell
from cellar.cells.tree_lstm import ChildSumNode, TreeInner, TreeLeaf
from cellar.ops.recurrent.rows import Rows, RowsModule

HIDDEN, INPUT, VOCAB, BATCH, ROWS = 12, 7, 30, 5, 60


def states(layers: int) -> tuple[int, ...]:
    return (HIDDEN,) if layers == 1 else (layers, HIDDEN)


def cells() -> list[object]:
    """Module, shapes of its inputs (None: a token), shapes of its outputs."""
    found: list[object] = []
    for layers in (1, 3):
        state = states(layers)
        for bias in (True, False):
            found += [
                (LSTMCell(INPUT, HIDDEN, layers, bias), [(INPUT,), state, state], [state, state]),
                (GRUCell(INPUT, HIDDEN, layers, bias), [(INPUT,), state], [state]),
            ]
        found += [
            (TokenLSTMCell(VOCAB, INPUT, HIDDEN, layers), [None, state, state], [state, state]),
            (TokenGRUCell(VOCAB, INPUT, HIDDEN, layers), [None, state], [state]),
            (DecoderCell(VOCAB, INPUT, HIDDEN, layers), [None, state, state], [None, state, state]),
            (ClassifierHead(HIDDEN, 4), [state], [None, (4,)]),
            (TokenHead(HIDDEN, VOCAB), [state], [None]),
            (ScoreHead(HIDDEN, VOCAB), [state, None], [()]),
        ]
    one = (HIDDEN,)
    return [
        *found,
        (TreeLeaf(VOCAB, INPUT, HIDDEN), [None], [one, one]),
        (TreeInner(HIDDEN), [one] * 4, [one, one]),
        (ChildSumNode(VOCAB, INPUT, HIDDEN, 3), [None] + [one] * 6, [one, one]),
    ]


def name(case: tuple[nn.Module, Sequence[object], Sequence[object]]) -> str:
    return f"{type(case[0]).__name__}-{case[1][-1]}-{len(list(case[0].parameters()))}"


class Tables:
    """Rows of every shape in use; states of one shape lie in one table, as in a bank."""

    def __init__(self) -> None:
        self.tables: dict[object, Tensor] = {}

    def rows(self, shape: tuple[int, ...] | None, first: int) -> Rows:
        if shape not in self.tables:
            table = torch.randint(VOCAB, (ROWS,)) if shape is None else torch.randn(ROWS, *shape)
            self.tables[shape] = table
        return Rows(self.tables[shape], torch.arange(first, first + BATCH).flip(0))


@pytest.mark.parametrize("case", cells(), ids=name)
@pytest.mark.parametrize("kept", [True, False])
def test_over_rows_as_forward(case: tuple[nn.Module, list[tuple[int, ...] | None], list[object]], kept: bool) -> None:
    torch.manual_seed(0)
    module, inputs, outputs = case
    assert isinstance(module, RowsModule)
    tables = Tables()
    sources = [tables.rows(shape, BATCH * k) for k, shape in enumerate(inputs)]
    start = BATCH * len(inputs)
    targets = [tables.rows(shape, start + BATCH * k) if kept else None for k, shape in enumerate(outputs)]  # type: ignore[arg-type]
    with torch.inference_mode():
        wanted = module(*(rows.gather() for rows in sources))
        wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
        before = {shape: table.clone() for shape, table in tables.tables.items()}
        got = module.on_rows(torch.device("cpu"))(sources, targets)
    assert got.finite.tolist() == [True] * BATCH
    for target, value, expected in zip(targets, got.values, wanted, strict=True):
        assert (value is None) == (target is not None)
        found = target.gather() if value is None else value
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    for shape, table in tables.tables.items():
        written = [int(i) for t in targets if t is not None and t.table is table for i in t.index]
        rest = [i for i in range(ROWS) if i not in written]
        assert torch.equal(table[rest], before[shape][rest]), "a row was written that is nobody's"


@pytest.mark.parametrize("case", cells(), ids=name)
def test_a_broken_row_is_found_and_its_neighbours_are_as_before(
    case: tuple[nn.Module, list[tuple[int, ...] | None], list[object]],
) -> None:
    torch.manual_seed(0)
    module, inputs, outputs = case
    broken = next((k for k in reversed(range(len(inputs))) if inputs[k] is not None), None)
    if broken is None:
        return  # words alone are never broken
    assert isinstance(module, RowsModule)
    results = []
    for value in (0.5, torch.nan):
        torch.manual_seed(1)
        tables = Tables()
        sources = [tables.rows(shape, BATCH * k) for k, shape in enumerate(inputs)]
        sources[broken].table[sources[broken].index[2]] = value
        with torch.inference_mode():
            results.append(module.on_rows(torch.device("cpu"))(sources, [None] * len(outputs)))
    good, bad = results
    assert bad.finite.tolist() == [True, True, False, True, True]
    others = [0, 1, 3, 4]
    for ours, theirs in zip(bad.values, good.values, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours[others], theirs[others])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_steps_as_torch(layers: int, bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(INPUT, HIDDEN, layers, bias=bias, batch_first=True)
    ours = LSTMCell(INPUT, HIDDEN, layers, bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(BATCH, 9, INPUT)
    with torch.inference_mode():
        _, (h_n, c_n) = theirs(x)
        h = c = torch.zeros(BATCH, *states(layers))
        for t in range(9):
            h, c = ours(x[:, t], h, c)
    torch.testing.assert_close(h.view(BATCH, layers, HIDDEN), h_n.transpose(0, 1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(c.view(BATCH, layers, HIDDEN), c_n.transpose(0, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_gru_steps_as_torch(layers: int, bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(INPUT, HIDDEN, layers, bias=bias, batch_first=True)
    ours = GRUCell(INPUT, HIDDEN, layers, bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(BATCH, 9, INPUT)
    with torch.inference_mode():
        _, h_n = theirs(x)
        h = torch.zeros(BATCH, *states(layers))
        for t in range(9):
            h = ours(x[:, t], h)
    torch.testing.assert_close(h.view(BATCH, layers, HIDDEN), h_n.transpose(0, 1), atol=1e-6, rtol=1e-5)


def test_tree_cells_by_the_papers_sums() -> None:
    """Equations 2-8 (child-sum) and 9-14 (two children) of arXiv 1503.00075, written out one node at a time."""
    torch.manual_seed(0)
    inner, node = TreeInner(HIDDEN), ChildSumNode(VOCAB, INPUT, HIDDEN, 3)
    h, c = torch.randn(2, 3, HIDDEN)
    with torch.inference_mode():
        weight, bias = inner.linear.weight.view(5, HIDDEN, 2, HIDDEN), inner.linear.bias.view(5, HIDDEN)
        i, o, u, left, right = (bias[g] + weight[g, :, 0] @ h[0] + weight[g, :, 1] @ h[1] for g in range(5))
        new = i.sigmoid() * u.tanh() + left.sigmoid() * c[0] + right.sigmoid() * c[1]
        got_h, got_c = inner(h[:1], h[1:2], c[:1], c[1:2])
        torch.testing.assert_close(got_c[0], new, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_h[0], o.sigmoid() * new.tanh(), atol=1e-6, rtol=1e-5)

        x = node.embedding.weight[4]
        w = node.weight_iou.view(3, HIDDEN, INPUT + HIDDEN)
        total = h[0] + h[1]
        i, o, u = (w[g, :, :INPUT] @ x + w[g, :, INPUT:] @ total + node.bias_iou.view(3, HIDDEN)[g] for g in range(3))
        new = i.sigmoid() * u.tanh()
        for k in range(2):
            new = new + (node.weight_fx @ x + node.weight_fh @ h[k] + node.bias_f).sigmoid() * c[k]
        zero = torch.zeros(1, HIDDEN)
        got_h, got_c = node(torch.tensor([4]), h[:1], h[1:2], zero, c[:1], c[1:2], zero)
        torch.testing.assert_close(got_c[0], new, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_h[0], o.sigmoid() * new.tanh(), atol=1e-6, rtol=1e-5)
