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


ACTIVATE = ". .venv/bin/activate"


def commands() -> list[str]:
    """Every command as a reader's shell has it: in the environment that the lines above it have made active."""
    found = []
    for block in blocks("sh"):
        active = ""
        for line in block.splitlines():
            command = line.split("#")[0].strip()
            if command == ACTIVATE:
                active = f"{ACTIVATE} && "
            else:
                found.append(active + command)
    return found


COMMANDS = commands()


def run(command: list[str], home: Path) -> str:
    environment = {**os.environ, "HOME": str(home)}
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


def test_the_shell_finds_cellar_only_once_the_environment_is_active() -> None:
    """A command of the README that begins with `cellar` comes after the line that makes it findable."""
    for command in COMMANDS:
        assert "cellar " not in command or ACTIVATE in command, command
