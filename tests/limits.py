"""Waiting with a limit: what hangs fails its test, and does not keep the run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 120.0
"""Far more than anything here takes on a busy machine."""


def run_python(code: str, *arguments: str) -> str:
    """Run a piece of Python in a process of its own; -> what it printed. Fails if the process does."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def join_all(threads: Sequence[threading.Thread], seconds: float = SECONDS) -> None:
    """Wait for the end of all of them."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"{alive} still run after {seconds:g} s"
