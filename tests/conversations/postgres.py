"""A PostgreSQL of one's own: a cluster in a temporary directory, as an unprivileged user where this one is root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _binary(name: str) -> str:
    """Debian keeps the server's programs out of the path."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name)
    assert found is not None, f"{name} is missing; scripts/setup-system installs PostgreSQL"
    return found


class Cluster:
    """A server that listens on a socket in its directory alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(directory, self._user)
        self._server: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(directory / "data"), "-U", "cellar", "-A", "trust", "--no-sync", "-E", "UTF8")
        self.start()

    @property
    def url(self) -> str:
        """Of its database."""
        return f"postgresql://cellar@/postgres?host={self.directory}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [_binary("postgres"), "-D", str(self.directory / "data"), "-k", str(self.directory), "-h", ""]
        with (self.directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [*command, "-c", "max_connections=200"], user=self._user, stdout=log, stderr=log, cwd="/"
            )
        end = time.monotonic() + 120
        ready = [_binary("pg_isready"), "-h", str(self.directory), "-U", "cellar", "-q"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._server.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it (SIGQUIT: as a crash)."""
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(120)
            self._server = None

    def empty(self) -> None:
        """Have no tables."""
        sql = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
        self._run("psql", "-q", "-h", str(self.directory), "-U", "cellar", "-d", "postgres", "-c", sql)

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [_binary(name), *arguments], user=self._user, check=True, capture_output=True, cwd="/", timeout=120
        )


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="cellar-pg-"))
    if os.geteuid() == 0:
        pwd.getpwnam("nobody")
    made = None
    try:
        made = Cluster(directory)
        yield made
    finally:
        if made is not None:
            made.stop()
        shutil.rmtree(directory, ignore_errors=True)
