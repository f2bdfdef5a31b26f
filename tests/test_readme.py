"""What the README promises: followed in a fresh clone, every command in it runs, and its example prints text.

`python -m pytest tests/test_readme.py -rP` shows the time and the output of each.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.limits import SECONDS

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


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the last commit in a folder of its own, with no environment in it."""
    folder = tmp_path_factory.mktemp("reader") / "cellar"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True, timeout=SECONDS)
    assert not (folder / ".venv").exists()
    return folder


def run(command: list[str], folder: Path) -> str:
    """A command in the clone as in a terminal of one's own; -> what it printed; -rP shows it, and its time."""
    strange = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS", "XDG_DATA_HOME", "XDG_STATE_HOME")
    strange += ("PYTHONDONTWRITEBYTECODE",)
    environment = {name: value for name, value in os.environ.items() if name not in strange}
    environment |= {"HOME": str(folder.parent), "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip")}
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    print(f"{time.monotonic() - started:.1f} s: {command[-1]}\n{done.stdout}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(960)
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NOT_RUN])
def test_commands_run(command: str, clone: Path) -> None:
    """In the README's order: the first one makes the environment."""
    assert run(["bash", "-c", command], clone).strip()


@pytest.mark.long
def test_the_python_example_runs(clone: Path) -> None:
    (example,) = blocks("python")
    printed = run([str(clone / ".venv" / "bin" / "python"), "-c", example], clone)
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
