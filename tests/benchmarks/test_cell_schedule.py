"""The benchmark of the cell scheduler measures graphs as the compiler makes them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.cell_schedule import chain_graph, lstm_spec, main
from tests.schedule.cells.graph import GraphMaker


@pytest.mark.parametrize("length", [2, 24, 40])
def test_its_chains_are_those_of_the_compiler(length: int) -> None:
    graph = GraphMaker(lstm_spec(64))
    steps = graph.chain("lstm", length, each={"token": [0] * length}, carry={"h": "h", "c": "c"})
    made, _, _ = graph.compiled(steps.node(-1)["label"])
    mine = chain_graph(length)
    np.testing.assert_array_equal(mine.parts[0].table[:, 4:], made.parts[0].table[:, 4:])
    np.testing.assert_array_equal(mine.parts[0].table[:, [0, 1, 3]], made.parts[0].table[:, [0, 1, 3]])
    assert (mine.needs, mine.num_codes, mine.valued) == (made.needs, made.num_codes, made.valued)


@pytest.mark.parametrize("options", [[], ["--per-task"]])
def test_it_prints_its_figures(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["--batch", "8", "--length", "6", "--seconds", "0.05", *options])
    few, many = json.loads(capsys.readouterr().out.splitlines()[-1])["timings"]
    assert (few["batch"], few["present"], many["present"]) == (8, 3, 16)
    assert few["all_nodes_per_second"] > 0
