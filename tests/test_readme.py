"""What the README promises: every command in it runs, and its example prints text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# The suite itself runs inside this one.
NOT_RUN = {"scripts/test"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]


def run(command: list[str], home: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "PATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NOT_RUN])
def test_commands_run(command: str, tmp_path: Path) -> None:
    assert run(["bash", "-c", command], tmp_path).strip()


@pytest.mark.long
def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    printed = run([sys.executable, "-c", example], tmp_path)
    assert "Once upon a time" in printed
    assert "The old fox" in printed


def test_what_is_not_run_is_there() -> None:
    assert set(COMMANDS) >= NOT_RUN
    for command in NOT_RUN:
        assert os.access(ROOT / command, os.X_OK)


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
