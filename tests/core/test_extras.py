"""What to type when a package is missing: a command that works where Cellar runs."""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path

import pytest

from cellar.core import extras

ROOT = Path(__file__).parent.parent.parent


def test_a_wheel_gets_the_packages_by_their_own_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No index knows `cellar-llm`; those of its extras are known."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    words = shlex.split(extras.command("server"))
    assert words[:4] == ["python", "-m", "pip", "install"]
    names = {word.split(">")[0].split("[")[0] for word in words[4:]}
    assert {"fastapi", "uvicorn", "pydantic", "llguidance"} <= names
    assert not any("cellar" in word for word in words)


def test_a_checkout_gets_its_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(ROOT / ".venv"))
    monkeypatch.chdir(ROOT)
    assert extras.command("server") == "scripts/setup server"
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / extras.command("bench").split()[0]).resolve() == ROOT / "scripts" / "setup"


def test_markers_of_the_platform_do_not_hide_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["a>=1", 'b>=2; extra == "bench"', "c>=3; (sys_platform != 'win32') and extra == 'bench'"]
    monkeypatch.setattr(metadata, "requires", lambda name: listed)
    assert extras.packages("bench") == ["b>=2", "c>=3"]


def test_the_error_names_the_package_and_the_command() -> None:
    error = str(extras.missing("serving needs", "fastapi", "server"))
    assert error.startswith("serving needs the package fastapi, which is not installed; run ")
    assert error.endswith(extras.command("server"))
