"""The directory that the processes of one server share: gone with the server, or at the next server's start.

A server that is killed leaves its directory: a socket, tallies. Who holds a directory holds a lock on a file in it,
which the system takes back when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from cellar.core.errors import ConfigError

logger = logging.getLogger(__name__)

LONGEST_NAME = 90
"""A socket's name has 108 bytes at most, and lies in the directory."""

_PREFIX, _NEW, _LOCK = "cellar-server-", "cellar-new-", "lock"


class PrivateDirectory:
    """A new directory for this process and its children, with mode 0700; a context manager that gives its path.

    First removes those that servers of the same user have left behind in `parent`, which is the system's place for
    temporary files unless given. Raises ConfigError if no socket can lie in it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent)
        # It gets its name once it is locked, so that nobody finds it without a lock.
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        self.path = new.with_name(new.name.replace(_NEW, _PREFIX, 1))
        if len(os.fsencode(self.path)) > LONGEST_NAME:
            new.rmdir()
            raise ConfigError(f"the temporary directory {parent} has too long a name; set TMPDIR to a shorter one.")
        self._lock: int | None = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path)

    def cleanup(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cleanup()


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove what killed servers of this user have left in `parent`; -> what that was."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(lock)
    if removed:
        logger.info("%d directories of servers that had been killed are removed", len(removed))
    return removed
