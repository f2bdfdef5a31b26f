"""Cases that only `scripts/test --all` runs: some of each function stay, and the list names nothing that is gone."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import ROOT
from tests.thinned import KEPT, thin


class Case(SimpleNamespace):
    nodeid: str
    own: set[str]

    def iter_markers(self, name: str) -> list[str]:
        return [name] if name in self.own else []

    def add_marker(self, mark: Any) -> None:
        self.own.add(mark.name)


def cases(name: str, count: int, *own: str) -> list[Any]:
    return [Case(nodeid=f"{name}[{k}]", own=set(own)) for k in range(count)]


@pytest.mark.parametrize("name", KEPT)
def test_each_function_is_there_and_has_cases(name: str) -> None:
    file, function = name.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"(parametrize|pytest\.fixture)[\s\S]*\ndef {function}\(", text), f"{name} is gone; mend the list"
    assert KEPT[name] >= 1


def test_those_that_stay_are_spread() -> None:
    name, kept = "tests/ops/test_rows_alone.py::test_quantized_products", 7
    assert KEPT[name] == kept
    many = cases(name, 21)
    other = cases("tests/ops/test_norm.py::test_norms", 3)
    thin([*many, *other])
    assert [k for k, case in enumerate(many) if "long" not in case.own] == [0, 3, 6, 9, 12, 15, 18]
    assert not any(case.own for case in other)


@pytest.mark.parametrize("count", [1, 5, 7])
def test_few_cases_all_stay(count: int) -> None:
    """One that is asked for by its own name is alone."""
    few = cases("tests/ops/test_rows_alone.py::test_quantized_products", count)
    thin(few)
    assert not any(case.own for case in few)


def test_cases_that_are_long_or_of_a_gpu_count_for_nothing() -> None:
    name = "tests/e2e/test_restart.py::test_holes_are_computed_again"
    long, gpu, plain = cases(name, 2, "long"), cases(name, 2, "gpu"), cases(name, 2)
    thin([*long, *gpu, *plain])
    assert [case.own for case in plain] == [set(), {"long"}]
