"""RedisLink: exchanges with a Redis server, each with one deadline; closed at once when the server does not answer.

    open ---- an exchange fails, or is late ----> closed: whoever asks hears so without a packet
     ^                                              | a probe after 0.25 s, then twice as long, up to 30 s
     +---- the probe and `greet` have succeeded ----+

A socket's timeouts begin anew with each byte, so a thread shuts the sockets of exchanges that have passed their
deadline. Another one probes, and calls `tend` now and then while the link is open.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from cellar.core.errors import ConfigError
from cellar.core.extras import missing

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""An exchange of chunks may take so long, all in all."""

TEND_SECONDS = 5.0
_CONNECT_SECONDS = 0.5
_PAUSE_SECONDS = (0.25, 30.0)

Command = tuple[bytes | str | int, ...]
Replies = list[Any]
"""One for each command; an exception for one that was refused."""


class RedisAway(OSError):
    """The server does not answer, or did not in time."""


class RedisLink:
    """Connections to the server of `url`, one for each thread that asks. Raises ConfigError for a URL of another kind.

    `greet` exchanges what must be said on coming back before anybody else is heard; it gets a function that exchanges,
    and may raise OSError. `tend` is called every few seconds while the link is open.
    """

    def __init__(self, url: str, greet: Callable[[], None], tend: Callable[[], None]) -> None:
        try:
            import redis
            import redis.backoff
            import redis.connection
            import redis.retry
        except ModuleNotFoundError as error:
            raise missing("kv_remote needs", error.name, "redis") from error
        try:
            self._options: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigError(f"kv_remote {named(url)} cannot be used ({error}).") from error
        self._kind = self._options.pop("connection_class", redis.connection.Connection)
        # Nothing is tried again behind our back, and no time of the URL's is longer than ours.
        self._options |= {
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            "socket_timeout": SECONDS,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "protocol": 2,
        }
        self._refusal = redis.ResponseError
        self._wrong = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
        self.name = named(url)
        self._greet, self._tend = greet, tend
        self._threads = threading.local()
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int]] = []
        self._under_way: dict[int, Any] = {}  # number of an exchange -> its connection
        self._numbers = 0
        self._open = False
        self._losses = 0  # how often it was closed by a failure: connections from before are of no use any more
        self._closing = False
        self._pause = 0.0
        self._probe_at = 0.0
        self._said: str | None = None
        self.num_failures = 0
        self.is_refused = False  # the password is wrong, say: waiting does not help
        works = (("watch", self._watch), ("link", self._keep))
        self._keepers = [threading.Thread(target=w, name=f"cellar-remote-{name}", daemon=True) for name, w in works]

    def start(self) -> None:
        """Begin to connect; `greet` and `tend` may be called from now on."""
        for keeper in self._keepers:
            keeper.start()

    @property
    def is_open(self) -> bool:
        """Whether the server has answered last time."""
        return self._open

    @property
    def last_error(self) -> str | None:
        """Why it is closed."""
        return self._said

    def wait_open(self, seconds: float) -> bool:
        """Wait for the first answer, or for a failure -> whether it is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._said is not None or self._closing, seconds)
        return self._open

    def exchange(self, commands: Sequence[Command], seconds: float = SECONDS) -> Replies:
        """Send commands in one go, and read what each is answered. Raises RedisAway, at once if the link is closed."""
        if not self._open:
            raise RedisAway(f"{self.name} is away ({self._said or 'not connected yet'})")
        return self._exchange(commands, seconds)

    def greeting(self, commands: Sequence[Command], seconds: float = SECONDS) -> Replies:
        """`exchange` for `greet`, which comes before the link is open."""
        return self._exchange(commands, seconds)

    def close(self) -> None:
        """End the thread, and what is under way."""
        with self._changed:
            self._closing, self._open = True, False
            for connection in self._under_way.values():
                _cut(connection)
            self._changed.notify_all()
        for keeper in self._keepers:
            if keeper.is_alive():
                keeper.join()

    # -- an exchange ------------------------------------------------------------------------------

    def _exchange(self, commands: Sequence[Command], seconds: float) -> Replies:
        if not commands:
            return []
        connection = getattr(self._threads, "connection", None)
        if connection is None or self._threads.losses != self._losses:
            # The server may be another one since: this thread's connection would only find out that it is gone.
            if connection is not None:
                _cut(connection)
            self._threads.losses = self._losses
            connection = self._threads.connection = self._kind(**self._options)
        number = self._begin(connection, time.monotonic() + seconds)
        replies: Replies = []
        try:
            connection.connect()  # does nothing if it is
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except self._refusal as error:
                    replies.append(error)
        except Exception as error:  # a socket that the keeper has shut fails in many ways
            late = not self._end(number)
            with suppress(Exception):
                connection.disconnect()
            self.is_refused = isinstance(error, self._wrong)
            said = f"no answer within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
            self._fail(said)
            raise RedisAway(f"{self.name} is away ({said})") from error
        if not self._end(number):
            # All was read at the very moment of the deadline; the connection is of no use any more.
            self._threads.connection = None
        return replies

    def _begin(self, connection: Any, deadline: float) -> int:
        with self._changed:
            self._numbers += 1
            self._under_way[self._numbers] = connection
            heapq.heappush(self._deadlines, (deadline, self._numbers))
            if self._deadlines[0][1] == self._numbers:
                self._changed.notify_all()
            return self._numbers

    def _end(self, number: int) -> bool:
        """-> False if the keeper has shut the connection."""
        with self._changed:
            found = self._under_way.pop(number, None) is not None
            while self._deadlines and self._deadlines[0][1] not in self._under_way:
                heapq.heappop(self._deadlines)
            return found

    def _fail(self, said: str) -> None:
        first, most = _PAUSE_SECONDS
        with self._changed:
            self.num_failures += 1
            was_open, self._open = self._open, False
            self._losses += was_open
            if was_open or self._probe_at <= time.monotonic():
                self._pause = first if was_open else min(max(2 * self._pause, first), most)
                self._probe_at = time.monotonic() + self._pause
            if was_open or self._said is None:
                logger.warning("the remote tier %s is away (%s); its KV is computed until it is back", self.name, said)
            self._said = said
            self._changed.notify_all()

    # -- the keepers ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Shut the connections of exchanges that are late."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                while self._deadlines and self._deadlines[0][0] <= now:
                    _, number = heapq.heappop(self._deadlines)
                    if (connection := self._under_way.pop(number, None)) is not None:
                        _cut(connection)
                self._changed.wait(self._deadlines[0][0] - now if self._deadlines else None)

    def _keep(self) -> None:
        """Probe while the link is closed, tend while it is open."""
        tend_at = 0.0
        while True:
            with self._changed:
                event, now = tend_at if self._open else self._probe_at, time.monotonic()
                if self._closing:
                    return
                if event > now:
                    self._changed.wait(event - now)
                    continue
                is_open = self._open
            if is_open:
                with suppress(OSError):
                    self._tend()
                tend_at = time.monotonic() + TEND_SECONDS
            else:
                self._probe()

    def _probe(self) -> None:
        try:
            self._exchange([("PING",)], SECONDS)
            self._greet()
        except OSError as error:
            if not isinstance(error, RedisAway):
                self._fail(str(error))
            return
        with self._changed:
            if self._closing:
                return
            if self._said is not None:
                logger.warning("the remote tier %s is back", self.name)
            self._open, self._said = True, None
            self._changed.notify_all()


def named(url: str) -> str:
    """A URL without its password, for people."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _cut(connection: Any) -> None:
    """Shut a connection that another thread reads from."""
    with suppress(Exception):
        connection.disconnect()
