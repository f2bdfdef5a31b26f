"""What `scripts/install.py` says while pip works."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parent.parent
PIP = """Obtaining file:///cellar
  Preparing editable metadata (pyproject.toml): started
Collecting torch<2.14,>=2.11
  Downloading torch-2.13.0-cp311-none-any.whl.metadata (30 kB)
Collecting typer>=0.15 (from cellar-llm==0.1)
  Using cached typer-0.29.2-py3-none-any.whl (56 kB)
Downloading torch-2.13.0-cp311-none-any.whl (184.5 MB)
Installing collected packages: typer, torch, markdown_it_py, cellar-llm
Successfully installed cellar-llm-0.1 torch-2.13.0 typer-0.29.2
"""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pips_lines_become_progress(install: ModuleType, tmp_path: Path) -> None:
    progress = install.Progress()
    lines = PIP.splitlines()
    said = [one for line in lines[:7] if (one := progress.feed(line)) is not None]
    assert said == ["downloading torch (184 MB)"]
    assert progress.collected == 2
    assert progress.megabytes == pytest.approx(184.6, abs=0.1)
    assert "fetching 2 packages, 185 MB: torch (184 MB)" in progress.line(12.0, tmp_path, 100)
    assert progress.feed(lines[7]) == "installing 4 packages"
    for name in ("torch-2.13.0.dist-info", "markdown_it_py-4.0.dist-info", "other-1.dist-info"):
        (tmp_path / name).mkdir()
    line = progress.line(20.0, tmp_path, 100)
    assert "installing 2 of 4 packages" in line
    assert line.count("#") == install.WIDTH // 2
    assert len(progress.line(20.0, tmp_path, 40)) < 40


def test_the_bar_runs_while_nothing_is_known(install: ModuleType, tmp_path: Path) -> None:
    progress = install.Progress()
    bars = {progress.line(seconds / 4, tmp_path, 100).split("]")[0] for seconds in range(20)}
    assert len(bars) > 15
    assert {bar.count("#") for bar in bars} == {4}


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_ends_with_its_time(install: ModuleType, tmp_path: Path, terminal: bool) -> None:
    code = f"import time\nfor line in {PIP!r}.splitlines(): print(line); time.sleep(0.05)"
    out = io.StringIO()
    assert install.run([sys.executable, "-c", code], out, terminal, tmp_path) == 0
    assert out.getvalue().strip().endswith("s  done")
    assert ("\r" in out.getvalue()) == terminal
    assert "Collecting" not in out.getvalue()


def test_a_failure_shows_what_pip_said(install: ModuleType, tmp_path: Path) -> None:
    out = io.StringIO()
    code = "import sys; print('ERROR: no matching distribution'); sys.exit(1)"
    assert install.run([sys.executable, "-c", code], out, False, tmp_path) == 1
    assert "ERROR: no matching distribution" in out.getvalue()
    assert "done" not in out.getvalue()


def test_setup_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "setup", "servers"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert "server, bench or test" in done.stderr
