"""Graphs with calls between them: in which order all of it happens, again and again. On the CPU graphs are tapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.runtime.recorder import Recorder, at_once
from tests.runtime.tape import tapes

CPU = torch.device("cpu")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs are asked for."""
    return tapes(monkeypatch)


def recorder() -> Recorder:
    return Recorder(CPU, lambda graph: graph.recording())  # type: ignore[attr-defined,no-any-return]


def test_calls_are_made_between_graphs_and_not_while_they_are_recorded(log: list[str]) -> None:
    here, x, calls = recorder(), torch.zeros(2), list[float]()

    def work() -> Any:
        y = x * 2
        here.between(lambda: calls.append(float(y[0])))
        z = y + 1
        here.between(lambda: calls.append(float(z[0])))
        return z * 3

    recorded, found = here.record(work)
    assert not calls
    assert recorded.num_graphs == 3
    assert log == [f"{what} {n}" for n in range(3) for what in ("begin", "end")]
    for number in (1.0, 5.0):
        x.fill_(number)
        calls.clear()
        recorded.replay()
        assert calls == [2 * number, 2 * number + 1], "each sees what was computed before it"
        assert found.tolist() == [3 * (2 * number + 1)] * 2
    here.between(lambda: calls.append(-1))
    at_once(lambda: calls.append(-2))
    assert calls[-2:] == [-1, -2], "nothing is recorded now"


def test_a_recording_that_fails_ends_its_graph_and_the_next_one_begins_anew(log: list[str]) -> None:
    here, x = recorder(), torch.ones(1)

    def bad() -> None:
        here.between(lambda: None)
        raise DeviceError("no")

    with pytest.raises(DeviceError, match="no"):
        here.record(bad)
    assert log == ["begin 0", "end 0", "begin 1", "end 1"]
    recorded, found = here.record(lambda: x + 1)
    x.fill_(4)
    recorded.replay()
    assert found.item() == 5
    assert log[-1] == "replay 2"
