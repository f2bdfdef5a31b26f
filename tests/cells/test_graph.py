"""The graph builder and its compiler: subgraphs, orders, rows, and everything that is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from cellar.cells import Cell, CellModel, Graph
from cellar.cells.watchdog import TookTooLongError, Watchdog
from cellar.core.cell_graphs import CellGraph, Column, Field
from cellar.core.errors import CellarError, ConfigError, RequestError
from tests.limits import SECONDS

SIZE = 4


class Step(nn.Module):
    def forward(self, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = s + x[:, None]
        return s, s.sum(1).to(torch.int64)


class Join(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + 2 * right


class Score(nn.Module):
    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return s[:, :3]


STEP = Cell("step", Step(), ("s", "sum"), shapes={"s": (SIZE,)}, high={"x": 1000})
JOIN = Cell("join", Join(), ("s",), priority=1)
SCORE = Cell("score", Score(), ("out",), priority=2)


def everything(graph: Graph, tokens: list[int]) -> Any:
    """An example that uses every cell."""
    steps = graph.chain(STEP, len(tokens), each={"x": tokens}, carry={"s": "s"})
    joined = graph.call(JOIN, left=steps[0]["s"], right=steps[-1]["s"])
    return graph.call(SCORE, s=joined["s"])["out"]


def model(unfold: Callable[..., Any], **options: Any) -> CellModel:
    """A model whose example is `everything`, and whose requests are unfolded by `unfold(graph)`."""

    def both(graph: Graph, tokens: Any = None) -> Any:
        return unfold(graph) if tokens is None else everything(graph, tokens)

    return CellModel("m", [STEP, JOIN, SCORE], both, {"tokens": [1, 2]}, **options)


def compiled(unfold: Callable[[Graph], Any]) -> CellGraph:
    return model(unfold).unfold({}).graph


def fields(graph: CellGraph, field: Field) -> list[int]:
    return [int(n) for n in graph.subgraphs[:, field]]


def column(made: CellModel, graph: CellGraph, cell: int, which: Column) -> list[int]:
    part = next(part for part in graph.parts if part.cell == cell)
    return [int(n) for n in part.table[:, which]]


# -- what is learned --------------------------------------------------------------------------------


def test_shapes_are_learned_from_the_example() -> None:
    made = model(lambda graph: None)
    step, join, score = made.spec.cells
    assert [(p.name, p.shape, p.dtype) for p in step.inputs] == [("x", (), "int64"), ("s", (SIZE,), "float32")]
    assert [p.dtype for p in step.outputs] == ["float32", "int64"]
    assert score.outputs[0].bank is None, "nothing could read it"
    assert step.outputs[1].bank == step.inputs[0].bank, "a sum could be the next x"
    assert {p.bank for p in join.inputs} == {step.outputs[0].bank}
    assert made.response.kind == "one"
    assert made.response.port.shape == (3,)


def test_a_cell_that_the_example_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="never feeds input 'left' of cell 'join'"):
        CellModel("m", [STEP, JOIN], lambda graph: graph.call(STEP, x=1)["s"], {})


def test_an_input_of_unknown_shape_is_to_be_declared() -> None:
    step = Cell("step", Step(), ("s", "sum"))
    with pytest.raises(ConfigError, match=r"declare shapes=\{'s'"):
        CellModel("m", [step], lambda graph: graph.call(step, x=1)["s"], {})


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()[None]


def test_a_cell_that_loses_the_batch_is_refused() -> None:
    flat = Cell("flat", Flat(), ("y",))
    with pytest.raises(ConfigError, match="for a batch of 2"):
        CellModel("m", [flat], lambda graph: graph.call(flat, x=1)["y"], {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": ()}, "outputs"),
        ({"outputs": ("a", "a")}, "different names"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (0, 4)}, "batch_sizes"),
        ({"shapes": {"z": (1,)}}, "its inputs are"),
        ({"high": {"z": 1}}, "its inputs are"),
    ],
)
def test_a_cell_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cell("step", Step(), **{"outputs": ("s", "sum"), **options})


def test_an_unfold_function_has_named_parameters() -> None:
    with pytest.raises(ConfigError, match="has no name"):
        CellModel("m", [STEP], lambda graph, *tokens: None, {})
    with pytest.raises(ConfigError, match="takes the graph"):
        CellModel("m", [STEP], lambda: None, {})


# -- subgraphs --------------------------------------------------------------------------------------


def test_a_chain_is_one_subgraph_and_takes_two_frames() -> None:
    graph = compiled(lambda g: g.chain(STEP, 100, each={"x": range(100)}, carry={"s": "s"})[-1]["s"])
    assert fields(graph, Field.NODES) == [100]
    assert graph.frames == (32 + 2, 2), "values take turns, and so do states and sums"
    assert graph.num_values == (100, 0)


def test_a_chain_whose_steps_are_read_keeps_all_of_them() -> None:
    def unfold(g: Graph) -> Any:
        steps = g.chain(STEP, 5, each={"x": range(5)}, carry={"s": "s"})
        return g.map(SCORE, 5, each={"s": steps["s"]})["out"]

    graph = compiled(unfold)
    assert graph.frames == (8 + 5, 5)
    assert fields(graph, Field.NODES) == [5, 1, 1, 1, 1, 1], "each score starts when its step is done"
    assert fields(graph, Field.WAITS) == [0, 1, 1, 1, 1, 1]


def test_leaves_are_one_subgraph_and_the_inner_nodes_another() -> None:
    def unfold(g: Graph) -> Any:
        children = [[0, 1], [2, 3], [4, 5]]
        nodes = g.tree(STEP, JOIN, leaves={"x": range(4)}, children=children, wires=({"left": "s"}, {"right": "s"}))
        return nodes[-1]["s"]

    made = model(unfold)
    graph = made.unfold({}).graph
    assert fields(graph, Field.NODES) == [4, 3]
    assert fields(graph, Field.WAITS) == [0, 4]
    assert column(made, graph, 0, Column.READY) == [4, 3, 2, 1]
    assert column(made, graph, 1, Column.READY) == [2, 1, 1]


def test_a_tree_of_16_leaves_has_15_inner_nodes() -> None:
    """Section 2.4.4 says 31, and counts all."""
    children = np.arange(30).reshape(15, 2)
    wires = ({"left": "s"}, {"right": "s"})
    graph = compiled(lambda g: g.tree(STEP, JOIN, leaves={"x": range(16)}, children=children, wires=wires)[-1]["s"])
    assert fields(graph, Field.NODES) == [16, 15]


def test_nodes_of_single_calls_join_where_they_are_connected() -> None:
    """A chain of single calls is one subgraph, like the vectorised one."""

    def unfold(g: Graph) -> Any:
        node = g.call(STEP, x=1)
        for k in range(6):
            node = g.call(STEP, x=k, s=node["s"])
        return node["s"]

    made = model(unfold)
    graph = made.unfold({}).graph
    assert fields(graph, Field.NODES) == [7]
    assert column(made, graph, 0, Column.READY) == [1] * 7


def test_a_type_that_is_left_and_entered_again_is_two_subgraphs() -> None:
    def unfold(g: Graph) -> Any:
        one = g.call(JOIN, left=[1.0] * SIZE)
        other = g.call(STEP, x=1, s=one["s"])
        both = g.call(JOIN, left=one["s"], right=other["s"])
        return g.call(JOIN, left=both["s"])["s"]

    graph = compiled(unfold)
    assert sorted(fields(graph, Field.NODES)) == [1, 1, 2]
    assert sorted(fields(graph, Field.WAITS)) == [0, 1, 2]


def test_ready_counts_follow_the_submitted_prefix() -> None:
    """A diamond: after the first node two are ready, after the second one, and then the last."""

    def unfold(g: Graph) -> Any:
        top = g.call(JOIN, left=[1.0] * SIZE)
        sides = [g.call(JOIN, left=top["s"]) for _ in range(2)]
        return g.call(JOIN, left=sides[0]["s"], right=sides[1]["s"])["s"]

    made = model(unfold)
    assert column(made, made.unfold({}).graph, 1, Column.READY) == [1, 2, 1, 1]


def test_a_growing_chain_is_three_rows_however_long() -> None:
    def unfold(g: Graph) -> Any:
        return g.grow(STEP, 5000, carry={"s": "s", "x": "sum"}, first={"x": 1}, stop=("sum", 7))["sum"]

    graph = compiled(unfold)
    assert fields(graph, Field.NODES) == [5000]
    assert len(graph.parts[0].table) == 3
    assert graph.frames == (1 + 2, 2)


def test_graphs_of_equal_form_are_compiled_once() -> None:
    made = model(lambda graph: None)
    one, other = made.unfold({"tokens": [1, 2, 3]}), made.unfold({"tokens": [9, 8, 7]})
    assert one.graph is other.graph
    assert one.graph is not made.unfold({"tokens": [1, 2]}).graph
    assert [v.tolist() for v in (one.values[0], other.values[0]) if v is not None] == [[1, 2, 3], [9, 8, 7]]


def test_compiled_graphs_are_forgotten_in_time() -> None:
    made = model(lambda graph: None)
    for n in range(2, 900):
        made.unfold({"tokens": [1] * n})
    assert made._cached_nodes < 2**18 + 1000
    assert len(made._compiled) < 898


def test_evaluate_is_the_definition() -> None:
    made = model(lambda graph: None)
    first, last = np.full(SIZE, 3.0), np.full(SIZE, 3.0 + 4 + 5)
    np.testing.assert_array_equal(made.evaluate({"tokens": [3, 4, 5]}), (first + 2 * last)[:3])


# -- what is refused --------------------------------------------------------------------------------

WIRES = ({"left": "s"}, {"right": "s"})
REFUSED: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "unknown cell": (lambda g: g.call("nobody"), "not one of this model's"),
    "cell of another model": (lambda g: g.call(Cell("step", Step(), ("s", "sum"))), "not one of this model's"),
    "unknown input": (lambda g: g.call(STEP, y=1), "has no input 'y'"),
    "unknown output": (lambda g: g.call(STEP)["h"], "has no output 'h'"),
    "shape of an edge": (lambda g: g.call(JOIN, left=g.call(STEP)["sum"]), "they must be equal"),
    "shape of a value": (lambda g: g.call(JOIN, left=[1.0, 2.0]), "they must be"),
    "dtype of a value": (lambda g: g.call(STEP, x=1.5), "float64"),
    "no number": (lambda g: g.call(STEP, x="a"), "cannot take"),
    "ragged": (lambda g: g.map(JOIN, 2, each={"left": [[1.0], [1.0, 2.0]]}), "cannot take"),
    "too high": (lambda g: g.call(STEP, x=1000), "outside of"),
    "too low": (lambda g: g.call(STEP, x=-1), "outside of"),
    "too few": (lambda g: g.chain(STEP, 3, each={"x": [1, 2]}, carry={"s": "s"}), "values for 3 nodes"),
    "too few outputs": (lambda g: g.map(SCORE, 3, each={"s": g.map(STEP, 2)["s"]}), "2 outputs for 3 nodes"),
    "negative count": (lambda g: g.map(STEP, -1), "at least 0"),
    "fed twice": (lambda g: g.chain(STEP, 3, each={"s": [0] * 3}, carry={"s": "s"}), "given twice"),
    "first without carry": (lambda g: g.chain(STEP, 3, carry={"s": "s"}, first={"x": 1}), "not carried"),
    "cycle": (
        lambda g: g.tree(STEP, JOIN, leaves={"x": [1]}, children=[[0, 2], [1, 0]], wires=WIRES)[-1]["s"],
        "cycle",
    ),
    "own child": (lambda g: g.tree(STEP, JOIN, leaves={"x": [1]}, children=[[0, 1]], wires=WIRES)[-1]["s"], "cycle"),
    "child that is not there": (
        lambda g: g.tree(STEP, JOIN, leaves={"x": [1]}, children=[[0, 5]], wires=WIRES),
        "outside",
    ),
    "children of another arity": (
        lambda g: g.tree(STEP, JOIN, leaves={"x": [1]}, children=[[0]], wires=WIRES),
        "columns",
    ),
    "no such node": (lambda g: g.map(STEP, 2)[2]["s"], "does not exist"),
    "nothing": (lambda g: {}, "no nodes"),
    "no output": (lambda g: g.call(STEP), "return outputs"),
    "a number": (lambda g: 3, "return outputs"),
    "growth without carry": (lambda g: g.grow(STEP, 3, carry={}), "carries nothing"),
    "growth without steps": (lambda g: g.grow(STEP, 0, carry={"s": "s"}), "at least 1"),
    "stop that is no symbol": (lambda g: g.grow(STEP, 3, carry={"s": "s"}, stop=("s", 1)), "one integer"),
    "reader of growth": (lambda g: g.call(SCORE, s=g.grow(STEP, 3, carry={"s": "s"})["s"]), "cannot take"),
    "a million nodes": (lambda g: g.map(STEP, 1_000_000), "more than 100000 nodes"),
    "a million single nodes": (lambda g: [g.call(STEP) for _ in range(1_000_000)], "more than 100000 nodes"),
    "a long growth": (lambda g: g.grow(STEP, 200_000, carry={"s": "s"}), "more than 100000 nodes"),
    "it raises": (lambda g: 1 / 0, "ZeroDivisionError"),
    "it recurses": (lambda g: (f := lambda: f())(), "too deeply"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    unfold, message = REFUSED[name]
    made = model(unfold, unfold_seconds=120.0)
    with pytest.raises(RequestError, match=message) as raised:
        made.unfold({})
    assert str(raised.value).endswith(".")
    assert isinstance(raised.value, CellarError)


def endless(graph: Graph) -> Any:
    while True:
        pass


def test_an_endless_unfold_is_interrupted() -> None:
    made = model(endless)
    made._watchdog.seconds = 0.2
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(RequestError, match="took more than"):
            made.unfold({})
    assert time.monotonic() - begin < SECONDS
    made._watchdog.seconds = SECONDS
    made.unfold({"tokens": [1, 2]})


def test_a_stubborn_unfold_is_interrupted_too() -> None:
    def stubborn(graph: Graph) -> Any:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    made = model(stubborn)
    made._watchdog.seconds = 0.2
    with pytest.raises(RequestError, match="took more than"):
        made.unfold({})


def test_a_busy_machine_ends_nobody() -> None:
    """What counts is the thread's own time; on the clock there is five times as much."""
    dog = Watchdog(1.0)
    assert dog.run(lambda: time.sleep(2.0)) is None
    with pytest.raises(TookTooLongError):
        dog.run(lambda: [time.sleep(0.05) for _ in range(2000)])


def test_the_watchdog_leaves_others_alone() -> None:
    dog = Watchdog(SECONDS)
    assert sum(dog.run(lambda: 1) for _ in range(1000)) == 1000
    dog.seconds = 0.3
    with pytest.raises(TookTooLongError):
        dog.run(lambda: endless(Graph([], None, (), {}, 0)))
    dog.seconds = SECONDS
    time.sleep(0.5)  # nothing is left over for this thread
    assert dog.run(lambda: 1) == 1


INTERRUPTED_THEN_PROFILED = """
import sys
from cellar.cells.watchdog import TookTooLongError, Watchdog

def endless():
    while True:
        pass

def plain():
    pass

try:
    Watchdog(0.1).run(endless)
except TookTooLongError:
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    plain()
    sys.setprofile(None)
    print(calls[:2])
"""


def test_the_interpreter_has_nothing_pending_after_an_interruption() -> None:
    """Else all threads look for it at each call, which a profiler shows: the first call never ends."""
    made = subprocess.run([sys.executable, "-c", INTERRUPTED_THEN_PROFILED], capture_output=True, timeout=SECONDS)
    assert made.stdout.split() == [b"['call',", b"'return']"], made.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "field 'tokens' is missing"),
        ({"tokens": [1], "other": 2}, "field 'other' is unknown"),
        ({"tokens": "abc"}, "field 'tokens' must be"),
        ({"tokens": [1, "a"]}, "field 'tokens' must be"),
        ({"tokens": [True]}, "field 'tokens' must be"),
        ({"tokens": [1], "scale": "x"}, "field 'scale' must be float"),
        ({"tokens": [1], "mode": "c"}, "field 'mode' must be"),
    ],
)
def test_fields_are_typed(given: dict[str, Any], message: str) -> None:
    def unfold(graph: Graph, tokens: list[int], scale: float = 1.0, mode: Literal["a", "b"] | None = None) -> Any:
        return everything(graph, tokens)

    made = CellModel("m", [STEP, JOIN, SCORE], unfold, {"tokens": [1, 2]})
    made.unfold({"tokens": [1, 2], "scale": 2, "mode": "a"})
    with pytest.raises(RequestError, match=message):
        made.unfold(given)
