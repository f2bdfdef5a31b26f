"""Clients in environments of their own (`scripts/setup-clients`), run as programs beside the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.limits import ROOT

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 240.0


def environment(client: str) -> Path:
    """The folder of a client's programs; it is made if it is not there."""
    subprocess.run([ROOT / "scripts" / "setup-clients", client], check=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
    return ROOT / ".clients" / client / "bin"


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Run a client in `folder`, which is its home as well; -> what it printed. Fails if it does."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    about = {"HOME": str(folder), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**known, **about, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_program(client: str, program: str, folder: Path, *arguments: str) -> str:
    """Run one of `programs/` in the environment of a client."""
    return run([environment(client) / "python", PROGRAMS / program, *arguments], folder)
