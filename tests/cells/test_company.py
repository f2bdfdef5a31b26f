"""On the CPU in float32 a node's outputs have the same bits alone and in every company, for every built-in cell.

Whatever the library makes of the processor (`ONEDNN_MAX_CPU_ISA`, torch's own `ATEN_CPU_CAPABILITY`), whatever the form
of the weights, and on one thread or two.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cellar.cells.gru import GRUCell, TokenGRUCell
from cellar.cells.heads import ClassifierHead, ScoreHead, TokenHead
from cellar.cells.lstm import LSTMCell, TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell
from cellar.cells.tree_lstm import ChildSumLeaf, ChildSumNode, TreeInner, TreeLeaf
from cellar.ops.linear.blocked import BlockedWeight
from cellar.ops.linear.half import HalfWeight
from cellar.ops.recurrent import rows as placing
from cellar.ops.recurrent.rows import Rows, RowsModule, StepsFunction
from tests.limits import ROOT, SECONDS

VOCAB, MOST = 40, 70
CPU = torch.device("cpu")
STATE, WORD = "state", "word"

Made = tuple[nn.Module, Sequence[str], int]
"""A module, what its inputs are, and how many outputs it has."""

CELLS: dict[str, Callable[[int], Made]] = {
    "lstm": lambda h: (LSTMCell(h, h), [STATE] * 3, 2),
    "lstm over words": lambda h: (TokenLSTMCell(VOCAB, 10, h), [WORD, STATE, STATE], 2),
    "lstm without bias": lambda h: (TokenLSTMCell(VOCAB, 10, h, bias=False), [WORD, STATE, STATE], 2),
    "gru": lambda h: (GRUCell(h, h), [STATE] * 2, 1),
    "gru over words": lambda h: (TokenGRUCell(VOCAB, 10, h), [WORD, STATE], 1),
    "decoder": lambda h: (DecoderCell(VOCAB, 10, h), [WORD, STATE, STATE], 3),
    "leaf": lambda h: (TreeLeaf(VOCAB, 10, h), [WORD], 2),
    "inner": lambda h: (TreeInner(h), [STATE] * 4, 2),
    "child-sum leaf": lambda h: (ChildSumLeaf(ChildSumNode(VOCAB, 10, h, 3)), [WORD], 2),
    "child-sum": lambda h: (ChildSumNode(VOCAB, 10, h, 3), [WORD, *[STATE] * 6], 2),
    "classifier": lambda h: (ClassifierHead(h, 5), [STATE], 2),
    "score": lambda h: (ScoreHead(h, VOCAB), [STATE, WORD], 1),
    "token": lambda h: (TokenHead(h, VOCAB), [STATE], 1),
}
FORMS = {"packed": None, "half": HalfWeight, "plain": BlockedWeight}


def outputs(module: nn.Module, inputs: Sequence[str], num_outputs: int, hidden: int) -> Callable[[slice], list[Tensor]]:
    """Nodes of a slice of 70 as one batch -> what they compute."""
    assert isinstance(module, RowsModule)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(7 * MOST, hidden, generator=generator)
    words = torch.randint(0, VOCAB, (MOST,), generator=generator)
    tables = {STATE: states, WORD: words}
    with torch.inference_mode():
        function = module.on_rows(CPU)
    if isinstance(function, StepsFunction):
        function = function.step

    def run(part: slice) -> list[Tensor]:
        sources = [
            Rows(tables[kind], torch.arange(MOST)[part] + (k * MOST if kind == STATE else 0))
            for k, kind in enumerate(inputs)
        ]
        with torch.inference_mode():
            found = function(sources, [None] * num_outputs)
        assert found.finite.all()
        return [value for value in found.values if value is not None]

    return run


def check(name: str, hidden: int) -> None:
    torch.manual_seed(0)
    run = outputs(*CELLS[name](hidden), hidden)
    whole = run(slice(0, MOST))
    parts = [slice(0, b) for b in (*range(1, 19), 32, 37, 64)] + [
        slice(k, k + b) for b in (1, 7, 16, 33) for k in (1, 30)
    ]
    for part in parts:
        for all_, some in zip(whole, run(part), strict=True):
            assert torch.equal(all_[part], some), f"{name}, hidden {hidden}: rows {part} differ"


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CELLS)
def test_bits_do_not_depend_on_the_company(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = FORMS[form]
    if chosen is not None:
        monkeypatch.setattr(placing, "pack", chosen)
    for hidden in (16, 20):
        check(name, hidden)


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", ["lstm over words", "decoder"])
def test_bits_do_not_depend_on_how_many_steps_are_one_call(name: str, steps: int) -> None:
    torch.manual_seed(0)
    hidden, batch = 20, 6
    module, _, num_outputs = CELLS[name](hidden)
    assert isinstance(module, RowsModule)
    with torch.inference_mode():
        function = module.on_rows(CPU)
        assert isinstance(function, StepsFunction)
        states = torch.randn(batch, hidden)
        words = torch.randint(0, VOCAB, (steps * batch,))
        index, every = torch.arange(batch), torch.arange(steps * batch)
        carried_word = function.carried.get(0) is not None
        sources = [Rows(words, index if carried_word else every), Rows(states, index), Rows(states, index)]
        together = function.run(sources, steps, [None] * num_outputs).values
        h, c, word = states, states, words[:batch]
        for t in range(steps):
            one = [Rows(word if carried_word else words[t * batch :], index), Rows(h, index), Rows(c, index)]
            values = function.step(one, [None] * num_outputs).values
            assert values[-2] is not None
            assert values[-1] is not None
            h, c = values[-2], values[-1]
            word = values[0] if carried_word and values[0] is not None else word
    assert together[-2] is not None
    assert together[-1] is not None
    assert torch.equal(together[-2], h)
    assert torch.equal(together[-1], c)


@pytest.mark.long
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_nor_on_the_processor_that_the_library_sees(isa: str) -> None:
    variables = {"ONEDNN_MAX_CPU_ISA": isa} | ({"ATEN_CPU_CAPABILITY": "avx2"} if isa == "AVX2" else {})
    command = [sys.executable, str(Path(__file__)), "16", "20", "256"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in map(int, sys.argv[1:]):
        for cell in CELLS:
            check(cell, size)
