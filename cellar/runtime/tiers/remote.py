"""A Redis server as a tier that several engines share: an entry for each chunk, under its identity (`entries.py`), that
expires after the time to live.

The server may drop, lose or change any of it at any moment, and may be away: see `docs/decisions/0034-remote-tier.md`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import ChunkLabel, KeptChunk
from cellar.runtime.memory import human
from cellar.runtime.tiers.entries import ENTRY_OVERHEAD_NBYTES, HEAD_NBYTES, WRITER_RANGE, Entries, Head
from cellar.runtime.tiers.forgotten import Forgotten, state_home
from cellar.runtime.tiers.redis_link import TEND_SECONDS, Command, RedisAway, RedisLink, Replies, named
from cellar.runtime.tiers.storage import Bytes

logger = logging.getLogger(__name__)

NUM_THREADS = 4

_START_SECONDS = 3.0
"""So long an engine that starts waits for the server, and so long it looks for what is there."""

_LOOKUP_SECONDS = 0.25
_ALIVE_SECONDS = int(3 * TEND_SECONDS)
_SCANNED = 1000
_ERASED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class _Held:
    """What a slot stands for; `writer` is whose entry is to be deleted with it, None if another engine sees to that."""

    label: ChunkLabel
    writer: bytes | None


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Where and how: `url` of the server, operator's `key`, bytes of chunks, seconds that an entry lives unused."""

    url: str
    key: str
    size: int
    ttl: float


class RemoteTier:
    """As many chunks as fit into `options.size` bytes of a Redis server.

    Raises ConfigError for options that cannot be used or a server that refuses the password, CapacityError if not one
    chunk fits. A server that is away is waited for beside the work: the tier is empty until then.
    """

    def __init__(self, options: RemoteOptions, fingerprint: bytes, chunk_nbytes: int) -> None:
        self._num_slots = options.size // (chunk_nbytes + ENTRY_OVERHEAD_NBYTES)
        if self._num_slots < 1:
            raise CapacityError(
                f"kv_remote_size asks for {human(options.size)}, but one chunk takes "
                f"{human(chunk_nbytes + ENTRY_OVERHEAD_NBYTES)}; ask for more, or leave it out."
            )
        self._ttl = max(1, round(options.ttl))
        self._entries = Entries(options.key, fingerprint, chunk_nbytes)
        self._lock = threading.Lock()
        self._slots: dict[int, _Held] = {}
        self._missed: set[int] = set()  # slots whose chunk could not be read last time
        self._unsure: set[bytes] = set()  # names that are to be deleted when the server is back
        self._kept: list[KeptChunk] = []
        self.num_damaged = 0
        try:
            self._forgotten = Forgotten(state_home(), fingerprint + named(options.url).encode(), options.ttl)
        except OSError as error:
            raise ConfigError(
                f"the journal of what was forgotten cannot be read ({error}); set XDG_STATE_HOME to another directory."
            ) from error
        self._link = RedisLink(options.url, self._greet, self._tend)
        try:
            self._link.start()
            self._open()
        except BaseException:
            self._link.close()
            raise

    @property
    def num_slots(self) -> int:
        """Chunks that it holds."""
        return self._num_slots

    @property
    def num_threads(self) -> int:
        """Several exchanges at a time fill a network better than one."""
        return NUM_THREADS

    @property
    def is_open(self) -> bool:
        """Whether the server answers."""
        return self._link.is_open

    def kept(self) -> Sequence[KeptChunk]:
        """Chunks that are on the server at the start, whoever wrote them."""
        return self._kept

    # -- chunks -----------------------------------------------------------------------------------

    def write(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Keep a chunk. Raises OSError if the server does not take it."""
        _raise(self.write_many([slot], chunk[None], [label]))

    def read(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Fill `chunk`. Raises OSError if the server does not bring what was written."""
        _raise(self.read_many([slot], chunk[None], [label]))

    def erase(self, slot: int) -> None:
        """Nothing of a slot's chunk is ever read again, even if the server is away. Raises OSError."""
        _raise(self.erase_many([slot]))

    def write_many(
        self, slots: Sequence[int], chunks: Bytes, labels: Sequence[ChunkLabel | None]
    ) -> list[OSError | None]:
        """Keep chunks [n, chunk_nbytes] in one exchange; -> for each why it was not kept."""
        said = [_known(label) for label in labels]
        names = [self._name(label) for label in said]
        with self._lock:
            before = [self._slots.pop(slot, None) for slot in slots]
            self._missed.difference_update(slots)
        commands: list[Command] = []
        try:
            self._drop([held for held in before if held is not None and held.writer is not None])
            for label, name, chunk in zip(said, names, chunks, strict=True):
                commands.append(("SET", name, self._entries.sealed(label, chunk), "EX", self._ttl))
            tails = [label for label in said if label.tokens]
            told = [(self._entries.tail_name(tail.parent), self._entries.sealed_tail(tail)) for tail in tails]
            commands += [("SET", name, sealed, "EX", self._ttl) for name, sealed in told]
            replies = self._link.exchange(commands)
        except OSError as error:
            with self._lock:  # some of it may have arrived
                self._unsure.update(names if commands else ())
                self._unsure.update(self._name(held.label) for held in before if held is not None and held.writer)
            return [error] * len(slots)
        failed: list[OSError | None] = []
        with self._lock:
            for slot, label, reply in zip(slots, said, replies, strict=False):  # those of tails come after
                if isinstance(reply, Exception):
                    failed.append(OSError(f"{self._link.name} does not take it: {reply}"))
                else:
                    self._slots[slot] = _Held(label, self._entries.writer)
                    failed.append(None)
        try:  # who writes it anew may have it
            self._forgotten.discard(label.identity for label, error in zip(said, failed, strict=True) if error is None)
        except OSError as error:
            failed = [
                error if label.identity in self._forgotten else one for label, one in zip(said, failed, strict=True)
            ]
        return failed

    def read_many(
        self, slots: Sequence[int], chunks: Bytes, labels: Sequence[ChunkLabel | None]
    ) -> list[OSError | None]:
        """Fill chunks [n, chunk_nbytes] in one exchange; -> for each why it was not."""
        names = [self._name(_known(label)) for label in labels]
        commands: list[Command] = [("GET", name) for name in names]
        commands += [("EXPIRE", name, self._ttl) for name in names]
        try:
            replies = self._link.exchange(commands)
        except OSError as error:
            with self._lock:
                self._missed.update(slots)
            return [error] * len(slots)
        failed: list[OSError | None] = []
        damaged: list[Command] = []
        for name, label, reply, chunk in zip(names, labels, replies, chunks, strict=False):
            try:
                self._read(_known(label), reply, chunk)
                failed.append(None)
            except OSError as error:
                if isinstance(reply, bytes):
                    self.num_damaged += 1
                    damaged.append(("DEL", name))
                failed.append(error)
        with self._lock:
            self._missed.update(slot for slot, error in zip(slots, failed, strict=True) if error is not None)
        if damaged:
            self._try(damaged)
        return failed

    def erase_many(self, slots: Sequence[int]) -> list[OSError | None]:
        """Nothing of these slots' chunks is ever read again: first said in the journal, then to the server.

        A chunk that could not be read is not forgotten, but only let go of: others may write it again.
        """
        with self._lock:
            held = [self._slots.pop(slot, None) for slot in slots]
            missed = self._missed.intersection(slots)
            self._missed -= missed
        names = [name for one in held if one is not None for name in self._entries.names(one.label)]
        journal: OSError | None = None
        try:
            pairs = zip(slots, held, strict=True)
            self._forgotten.add(one.label.identity for slot, one in pairs if one is not None and slot not in missed)
        except OSError as error:
            journal = error
        try:
            _accepted(self._link.exchange([("DEL", name) for name in names]))
        except OSError as error:
            if journal is not None:
                with self._lock:
                    self._slots.update({slot: one for slot, one in zip(slots, held, strict=True) if one is not None})
                said = f"what is forgotten can be written neither to the journal ({journal}) nor to {error}"
                return [OSError(said)] * len(slots)
            with self._lock:
                self._unsure.update(names)
        return [None] * len(slots)

    def close(self) -> None:
        """Let go of the server; what it has stays there for the next engine."""
        self._try([("DEL", self._entries.alive())])
        self._link.close()

    # -- what other engines have written ----------------------------------------------------------

    def find(self, wanted: Sequence[ChunkLabel], parents: Sequence[bytes]) -> list[ChunkLabel]:
        """Which of `wanted` are on the server, and tails that follow any of `parents`. Takes a quarter of a second at
        most; raises RedisAway.
        """
        wanted = [label for label in wanted if label.identity not in self._forgotten]
        commands: list[Command] = [("EXISTS", self._name(label)) for label in wanted]
        if parents:
            commands.append(("MGET", *(self._entries.tail_name(parent) for parent in parents)))
        begin = time.monotonic()
        replies = self._link.exchange(commands, _LOOKUP_SECONDS)
        found = [label for label, reply in zip(wanted, replies, strict=False) if reply == 1]
        tails = []
        for parent, sealed in zip(parents, replies[-1] if parents else (), strict=False):
            try:
                tail = self._entries.open_tail(parent, sealed)
            except OSError:
                continue
            if tail.identity not in self._forgotten:
                tails.append(tail)
        left = _LOOKUP_SECONDS - (time.monotonic() - begin)
        there = self._link.exchange([("EXISTS", self._name(tail)) for tail in tails], max(0.01, left))
        return found + [tail for tail, reply in zip(tails, there, strict=True) if reply == 1]

    def adopt(self, slots: Sequence[int], labels: Sequence[ChunkLabel]) -> None:
        """Slots stand for chunks of other engines from now on; what they held before is deleted. Never blocks."""
        with self._lock:
            for slot, label in zip(slots, labels, strict=True):
                before = self._slots.get(slot)
                if before is not None and before.writer is not None and before.label.identity != label.identity:
                    self._unsure.add(self._name(before.label))
                self._slots[slot] = _Held(label, None)
                self._missed.discard(slot)

    # -- beside the work --------------------------------------------------------------------------

    def _open(self) -> None:
        """Find what is there. Raises ConfigError if the server will not have us."""
        if not self._link.wait_open(_START_SECONDS):
            if self._link.is_refused:
                raise ConfigError(
                    f"kv_remote {self._link.name} refuses this engine ({self._link.last_error}); put user and password "
                    "into the URL: redis://USER:PASSWORD@HOST."
                )
            logger.warning("the remote tier %s is away (%s); it is empty until it is back", *self._away())
            return
        try:
            self._kept = self._scan(time.monotonic() + _START_SECONDS)
        except OSError as error:
            logger.warning("not all of the remote tier could be looked through: %s", error)

    def _away(self) -> tuple[str, str]:
        return self._link.name, self._link.last_error or "no answer yet"

    def _greet(self) -> None:
        """The server is back, perhaps with an old snapshot: first of all it forgets what is forgotten."""
        forgotten = self._forgotten.all()
        for first in range(0, len(forgotten), _ERASED_AT_ONCE):
            part = forgotten[first : first + _ERASED_AT_ONCE]
            _accepted(self._link.greeting([("DEL", *(self._entries.name(identity) for identity in part))]))
        self._sweep(greeting=True)
        self._link.greeting([("SET", self._entries.alive(), b"", "EX", _ALIVE_SECONDS)])

    def _tend(self) -> None:
        """Say that this engine is there, and delete what has lost its slot."""
        self._link.exchange([("SET", self._entries.alive(), b"", "EX", _ALIVE_SECONDS)])
        self._sweep()

    def _sweep(self, greeting: bool = False) -> None:
        with self._lock:
            names = list(self._unsure)
        exchange = self._link.greeting if greeting else self._link.exchange
        for first in range(0, len(names), _ERASED_AT_ONCE):
            part = names[first : first + _ERASED_AT_ONCE]
            with self._lock:  # what was written anew meanwhile stays
                here = {self._name(held.label) for held in self._slots.values()}
                part = [name for name in part if name not in here]
            _accepted(exchange([("DEL", *part)] if part else []))
        with self._lock:
            self._unsure.difference_update(names)

    def _scan(self, deadline: float) -> list[KeptChunk]:
        """The youngest chunks of this fingerprint, each with a slot."""
        found: dict[bytes, Head] = {}
        cursor: bytes | None = None
        while cursor != b"0" and time.monotonic() < deadline:
            scan = ("SCAN", cursor or 0, "MATCH", self._entries.pattern, "COUNT", _SCANNED)
            cursor, names = _accepted(self._link.exchange([scan]))[0]
            entries = self._link.exchange([("GETRANGE", name, 0, HEAD_NBYTES - 1) for name in names])
            for name, entry in zip(names, entries, strict=True):
                if isinstance(entry, bytes) and (head := self._head(name, entry)) is not None:
                    found[head.label.identity] = head
        heads = sorted(found.values(), key=lambda head: -head.since)[: self._num_slots]
        writers = sorted({head.writer for head in heads})
        alive = self._link.exchange([("EXISTS", self._entries.alive(writer)) for writer in writers])
        mine = {writer for writer, reply in zip(writers, alive, strict=True) if reply == 0}
        now = time.time()
        for slot, head in enumerate(heads):
            self._slots[slot] = _Held(head.label, head.writer if head.writer in mine else None)
        return [KeptChunk(slot, head.label, max(0.0, now - head.since)) for slot, head in enumerate(heads)]

    def _head(self, name: bytes, entry: bytes) -> Head | None:
        """What an entry says of itself; None for what is none of ours, or forgotten."""
        try:
            head = self._entries.head(name, entry)
        except OSError:
            self.num_damaged += 1
            return None
        return None if head is None or head.label.identity in self._forgotten else head

    def _drop(self, gone: Sequence[_Held]) -> None:
        """Delete entries that lost their slots, unless another engine has written them since. Raises RedisAway."""
        if not gone:
            return
        names = [self._name(held.label) for held in gone]
        writers = self._link.exchange([("GETRANGE", name, *WRITER_RANGE) for name in names])
        theirs = zip(names, gone, writers, strict=True)
        self._link.exchange([("DEL", name) for name, held, writer in theirs if writer == held.writer])

    def _try(self, commands: Sequence[Command]) -> None:
        """What need not succeed."""
        try:
            self._link.exchange(commands)
        except RedisAway:
            logger.debug("the remote tier has gone away")

    def _read(self, label: ChunkLabel, entry: object, chunk: Bytes) -> None:
        """Fill `chunk` from what the server brought. Raises OSError."""
        if label.identity in self._forgotten:
            raise OSError("the chunk was forgotten")
        if not isinstance(entry, bytes):
            raise OSError(f"{self._link.name} does not have the chunk any more" if entry is None else str(entry))
        self._entries.open(entry, label, chunk)

    def _name(self, label: ChunkLabel) -> bytes:
        return self._entries.name(label.identity)


def _known(label: ChunkLabel | None) -> ChunkLabel:
    assert label is not None, "what outlives the process must say what it is"
    return label


def _accepted(replies: Replies) -> Replies:
    """The same replies. Raises OSError if one is a refusal."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise OSError(f"the server refuses: {reply}")
    return replies


def _raise(failed: Sequence[OSError | None]) -> None:
    for error in failed:
        if error is not None:
            raise error
