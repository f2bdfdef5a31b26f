"""Forgotten: a journal of identities that must never be read again, though the server that has them cannot be asked.

    a record for each: identity (16) | seconds since 1970 (8) | checksum of both (8)

It is written and synced before anybody is told that something is forgotten. An identity stays in it as long as an entry
lives on the server: a server that comes back with an old snapshot must not bring it back.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from xxhash import xxh3_64_intdigest

_RECORD = struct.Struct("<16sdQ")


def state_home() -> Path:
    """Where a user's programs keep what they must not lose between runs: $XDG_STATE_HOME/cellar."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "cellar"


class Forgotten:
    """The journal of one server and fingerprint (`name`), in `directory`. Threads may use it at a time.

    Several processes may: they append, and each reads what was there when it began. Without a directory that can be
    written `add` raises OSError.
    """

    def __init__(self, directory: Path, name: bytes, seconds: float) -> None:
        self._path = directory / f"forgotten-{blake2b(name, digest_size=8).hexdigest()}"
        self._seconds = seconds
        self._lock = threading.Lock()
        self._since: dict[bytes, float] = {}
        self._read()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._since

    def all(self) -> list[bytes]:
        """Identities whose time to live has not passed."""
        with self._lock:
            oldest = time.time() - self._seconds
            self._since = {identity: since for identity, since in self._since.items() if since > oldest}
            return list(self._since)

    def add(self, identities: Iterable[bytes]) -> None:
        """They are safe in the journal when this returns. Raises OSError if it cannot be written."""
        with self._lock:
            self._append([(identity, time.time()) for identity in identities])

    def discard(self, identities: Iterable[bytes]) -> None:
        """They are written anew, by who may have them."""
        with self._lock:
            self._append([(identity, 0.0) for identity in identities if identity in self._since])

    def _append(self, records: list[tuple[bytes, float]]) -> None:
        if not records:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._path, "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.tell() % _RECORD.size:  # what was torn before is made a record of nothing
                file.write(bytes(_RECORD.size - file.tell() % _RECORD.size))
            file.write(b"".join(_record(identity, since) for identity, since in records))
            file.flush()
            os.fsync(file.fileno())
        self._apply(records)

    def _apply(self, records: Iterable[tuple[bytes, float]]) -> None:
        for identity, since in records:
            if since:
                self._since[identity] = since
            else:
                self._since.pop(identity, None)

    def _read(self) -> None:
        """Take in what is whole, and write the file anew without what has passed."""
        try:
            with open(self._path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                data = file.read()
                for at in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
                    identity, since, checksum = _RECORD.unpack_from(data, at)
                    if checksum == xxh3_64_intdigest(data[at : at + 24]):
                        self._apply([(identity, since)])
                oldest = time.time() - self._seconds
                left = b"".join(_record(i, since) for i, since in self._since.items() if since > oldest)
                if len(left) < len(data) // 2:
                    file.seek(0)
                    file.write(left)
                    file.truncate()
                    os.fsync(file.fileno())
        except FileNotFoundError:
            return


def _record(identity: bytes, since: float) -> bytes:
    head = _RECORD.pack(identity, since, 0)[:24]
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
