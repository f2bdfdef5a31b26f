"""A Redis of one's own: a server in a temporary directory that listens on a socket there alone."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from tests.limits import SECONDS


class RedisServer:
    """It keeps nothing when it ends, unless `snapshot` was called. `options` are further ones of its command line."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "socket"

    @property
    def url(self) -> str:
        """As `kv_remote` wants it."""
        return f"unix://{self.socket}"

    @property
    def client(self) -> redis.Redis:
        """A new client."""
        return redis.Redis(unix_socket_path=str(self.socket))

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("redis-server")
        assert program is not None, "there is no redis-server; run scripts/setup-system."
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.directory), "--save", ""]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + SECONDS
        while True:
            assert self._process.poll() is None, "redis-server has ended"
            try:
                with self.client as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                pass
            assert time.monotonic() < end
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP makes it hang."""
        assert self._process is not None
        self._process.send_signal(number)

    def snapshot(self) -> None:
        """What it has now comes back after a restart."""
        with self.client as client:
            client.save()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SECONDS)
            self._process = None
            self.socket.unlink(missing_ok=True)

    def chunks(self) -> list[bytes]:
        """Names of all entries of chunks."""
        with self.client as client:
            return sorted(client.keys("cellar:1:*:c:*"))


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="cellar-redis-"))
    server = RedisServer(directory, *options)
    try:
        yield server
    finally:
        with suppress(AssertionError):
            server.signal(signal.SIGCONT)
        server.kill()
        shutil.rmtree(directory)


class SlowRedis:
    """Passes everything on to a server; of its answers `piece` bytes each `pause` seconds, as fast as it can with 0."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.path = server.directory / "slow"
        self.piece, self.pause = 2**16, 0.0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """As `kv_remote` wants it."""
        return f"unix://{self.path}"

    def close(self) -> None:
        """Take nobody else."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._server.socket))
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(self.piece if slowly else 2**16):
                if slowly and self.pause:
                    time.sleep(self.pause)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
