"""What a server shares among its processes: gone with it, or when the next one starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cellar.core.errors import ConfigError
from cellar.server.directory import LONGEST_NAME, PrivateDirectory, remove_abandoned
from tests.limits import ROOT, SECONDS

HOLD = (
    "import sys, pathlib\n"
    "from cellar.server.directory import PrivateDirectory\n"
    "held = PrivateDirectory(pathlib.Path(sys.argv[1]))\n"
    "(held.path / 'engine').write_text('a socket')\n"
    "print(held.path, flush=True)\n"
    "sys.stdin.read()"
)


def test_what_a_killed_server_leaves_goes_when_the_next_one_starts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        holders = [
            subprocess.Popen(
                [sys.executable, "-c", HOLD, folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        try:
            killed, alive = (Path((holder.stdout or sys.stdin).readline().strip()) for holder in holders)
            foreign = parent / "cellar-server-foreign"
            foreign.mkdir()  # no lock: not one of ours
            (parent / "cellar-server-link").symlink_to(killed)
            assert killed.stat().st_mode & 0o777 == 0o700
            holders[0].send_signal(signal.SIGKILL)
            holders[0].wait(SECONDS)
            assert (killed / "engine").exists()
            with PrivateDirectory(parent) as own:
                assert not killed.exists()
                assert (alive / "engine").exists()
                assert foreign.exists()
                assert remove_abandoned(parent) == []
                assert own.exists()
            assert not own.exists()
        finally:
            for holder in holders:
                holder.kill()
                holder.communicate(timeout=SECONDS)


def test_a_place_with_too_long_a_name_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / ("x" * LONGEST_NAME)
    parent.mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        PrivateDirectory(parent)
    assert not list(parent.iterdir())
