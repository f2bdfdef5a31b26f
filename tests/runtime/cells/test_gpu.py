"""The runtime of cells on a GPU: graphs and eager against the CPU, what no graph can hold, two workers, no waiting."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.gru import TokenGRUCell
from cellar.cells.heads import ClassifierHead, ScoreHead
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.seq2seq import DecoderCell, translator
from cellar.cells.sequence import classifier, scorer
from cellar.cells.tree_lstm import ChildSumNode, TreeInner, TreeLeaf, child_sum_classifier, tree_classifier
from cellar.core.cell_graphs import CellConfig
from cellar.core.errors import RequestError
from cellar.engine.cells import CellEngine
from cellar.runtime.cells.local import LocalCellRuntime
from cellar.runtime.probes import cells as probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

VOCAB, INPUT, HIDDEN, CLASSES = 90, 48, 64, 5
SIZES = (1, 2, 4, 8, 32)
GPU = "cuda:0"


def models(dtype: torch.dtype = torch.float32) -> list[CellModel]:
    """Every built-in kind, with the same weights each time."""
    torch.manual_seed(0)

    def to(*modules: nn.Module) -> list[Any]:
        return [module.to(dtype) for module in modules]

    decoder = DecoderCell(VOCAB, INPUT, HIDDEN)
    with torch.no_grad():
        decoder.output.weight.mul_(20)  # no two logits are nearly equal
    return [
        classifier(
            *to(TokenLSTMCell(VOCAB, INPUT, HIDDEN, 2), ClassifierHead(HIDDEN, CLASSES)), name="lstm", batch_sizes=SIZES
        ),
        classifier(
            *to(TokenGRUCell(VOCAB, INPUT, HIDDEN), ClassifierHead(HIDDEN, CLASSES)), name="gru", batch_sizes=SIZES
        ),
        scorer(*to(TokenLSTMCell(VOCAB, INPUT, HIDDEN), ScoreHead(HIDDEN, VOCAB)), name="score", batch_sizes=SIZES),
        translator(
            *to(TokenLSTMCell(VOCAB, INPUT, HIDDEN), decoder),
            1,
            2,
            max_tokens=24,
            name="translate",
            encoder_batch_sizes=SIZES,
            decoder_batch_sizes=SIZES[:-1],
        ),
        tree_classifier(
            *to(TreeLeaf(VOCAB, INPUT, HIDDEN), TreeInner(HIDDEN), ClassifierHead(HIDDEN, CLASSES)), batch_sizes=SIZES
        ),
        child_sum_classifier(
            *to(ChildSumNode(VOCAB, INPUT, HIDDEN, 3), ClassifierHead(HIDDEN, CLASSES)), batch_sizes=SIZES
        ),
    ]


def requests(name: str, count: int = 60) -> list[dict[str, Any]]:
    shuffle = random.Random(0)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        tokens = [shuffle.randrange(VOCAB) for _ in range(shuffle.randint(2, 30))]
        if name == "tree_classifier":
            roots, children = list(range(len(tokens))), []
            while len(roots) > 1:
                children.append([roots.pop(shuffle.randrange(len(roots))) for _ in range(2)])
                roots.append(len(tokens) + len(children) - 1)
            found.append({"tokens": tokens, "children": children})
        elif name == "child_sum_classifier":
            found.append({"tokens": tokens, "parents": [(k - 1) // 3 if k else -1 for k in range(len(tokens))]})
        else:
            found.append({"tokens": tokens})
    return found


def served(
    given: Sequence[CellModel], asked: dict[str, list[dict[str, Any]]], devices: Sequence[str], *, eager: bool = False
) -> dict[str, list[Any]]:
    """All requests of all models at once."""
    runtime = LocalCellRuntime(
        [m.spec for m in given],
        [m.modules for m in given],
        devices,
        memory_bytes=2**28,
        num_threads=1,
        enforce_eager=eager,
    )
    with CellEngine(given, runtime, CellConfig(max_tasks=4)) as engine:
        futures = {name: [engine.submit(name, fields) for fields in own] for name, own in asked.items()}
        engine.start()
        found = {name: [future.result(120) for future in own] for name, own in futures.items()}
        engine.scheduler.check_integrity()
        return found


def compare(found: dict[str, list[Any]], wanted: dict[str, list[Any]], limit: float) -> None:
    for name, answers in wanted.items():
        for ours, theirs in zip(found[name], answers, strict=True):
            if name == "translate":
                assert [int(t) for t in ours["tokens"]] == [int(t) for t in theirs["tokens"]]
                continue
            key = "logprobs" if name == "score" else "logits"
            np.testing.assert_allclose(np.stack(ours[key]), np.stack(theirs[key]), atol=limit, rtol=limit)


@pytest.fixture(scope="module")
def on_the_cpu() -> dict[str, list[Any]]:
    given = models()
    return served(given, {model.name: requests(model.name) for model in given}, ["cpu"])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param([GPU], id="one"),
        pytest.param([GPU, GPU], id="two on one"),
        pytest.param([GPU, "cpu"], id="with the cpu"),
        pytest.param(
            [GPU, "cuda:1"],
            id="two",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has one CUDA device"),
        ),
    ],
)
def test_as_on_the_cpu(on_the_cpu: dict[str, list[Any]], devices: list[str], eager: bool) -> None:
    given = models()
    asked = {model.name: requests(model.name) for model in given}
    compare(served(given, asked, devices, eager=eager), on_the_cpu, 1e-4)


def test_in_bfloat16(on_the_cpu: dict[str, list[Any]]) -> None:
    given = [model for model in models(torch.bfloat16) if model.name != "translate"]
    asked = {model.name: requests(model.name) for model in given}
    found = served(given, asked, [GPU])
    compare(found, {name: on_the_cpu[name] for name in asked}, 0.1)


def test_no_task_waits_for_the_device(on_the_cpu: dict[str, list[Any]]) -> None:
    """torch raises at whatever would make the host wait."""
    given = models()
    asked = {model.name: requests(model.name) for model in given}
    runtime = LocalCellRuntime(
        [m.spec for m in given], [m.modules for m in given], [GPU], memory_bytes=2**28, num_threads=1
    )
    with CellEngine(given, runtime, CellConfig(max_tasks=4)) as engine:
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = {name: engine.run(name, own) for name, own in asked.items()}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    compare(found, on_the_cpu, 1e-4)


class Doubled(nn.Module):
    """A user's cell: x -> 2 x. `looks`: at a value on the host, which no graph can hold."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.two = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and bool((x == 12345.0).any()):
            raise ValueError("that number")
        return x * self.two


@pytest.mark.parametrize("looks", [False, True])
def test_a_module_of_the_users(looks: bool, caplog: pytest.LogCaptureFixture) -> None:
    cell = Cell("double", Doubled(looks), ("y",), batch_sizes=(1, 4, 16))

    def unfold(graph: Graph, x: list[float], times: int) -> Any:
        return graph.chain(cell, times, carry={"x": "y"}, first={"x": x})["y"]

    model = CellModel("user", [cell], unfold, {"x": [1.0, 2.0], "times": 2})
    asked = [{"x": [float(k), 1.0], "times": 1 + k % 5} for k in range(40)]
    with caplog.at_level(logging.WARNING):
        found = served([model], {"user": asked}, [GPU])["user"]
    assert ("not captured" in caplog.text) == looks
    for fields, answer in zip(asked, found, strict=True):
        wanted = [[v * 2 ** (t + 1) for v in fields["x"]] for t in range(fields["times"])]
        assert np.stack(answer).tolist() == wanted
    if looks:
        asked.insert(7, {"x": [12345.0, 1.0], "times": 3})
        runtime = LocalCellRuntime([model.spec], [model.modules], [GPU], memory_bytes=2**26)
        with CellEngine([model], runtime) as engine:
            again = engine.run("user", asked, raise_errors=False)
        assert isinstance(again[7], RequestError)
        assert "that number" in str(again[7])
        assert [np.stack(a).tolist() for a in again[:7] + again[8:]] == [np.stack(a).tolist() for a in found]


def test_a_state_that_is_not_finite_fails_its_request_alone() -> None:
    torch.manual_seed(0)
    module, head = TokenLSTMCell(VOCAB, INPUT, HIDDEN), ClassifierHead(HIDDEN, CLASSES)
    with torch.no_grad():
        module.embedding.weight[7] = torch.nan
    model = classifier(module, head, batch_sizes=SIZES)
    good = [{"tokens": [t for t in fields["tokens"] if t != 7] or [1]} for fields in requests("lstm", 20)]
    runtime = LocalCellRuntime([model.spec], [model.modules], [GPU], memory_bytes=2**26)
    with CellEngine([model], runtime, CellConfig()) as engine:
        before = engine.run(model.name, good)
        after = engine.run(model.name, [*good[:9], {"tokens": [3, 7, 3]}, *good[9:]], raise_errors=False)
    assert isinstance(after[9], RequestError)
    for one, other in zip(before, after[:9] + after[10:], strict=True):
        np.testing.assert_allclose(one["logits"], other["logits"], atol=1e-5)


def test_batches_are_timed_and_the_memory_returns() -> None:
    torch.manual_seed(0)
    model = models()[0]
    spec = model.spec
    # The library keeps a workspace for each stream that it has worked on.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    runtime = LocalCellRuntime([spec], [model.modules], [GPU], rows=[probe.rows_needed(spec)])
    for batch in spec.cells[0].batch_sizes:
        assert all(1e-6 < seconds < 1 for seconds in probe.task_seconds(runtime, probe.task_plan(spec, 0, batch)))
    runtime.close()
    del runtime
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + 2**20
