"""The page docs/cells.md runs from top to bottom, and says what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "cells.md").read_text(encoding="utf-8")


def test_the_page_builds_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile("\n".join(blocks), "docs/cells.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    (promised,) = re.findall(r"The last line prints: `(.*)`", PAGE)
    assert printed[-1] == promised
    assert printed[-2] == "(32,)"


def test_the_table_of_calls_is_whole() -> None:
    from cellar.cells import Graph

    named = set(re.findall(r"^\| `graph\.(\w+)\(", PAGE, re.MULTILINE))
    assert named == {name for name in vars(Graph) if not name.startswith("_")} - {"compiled", "request"}
