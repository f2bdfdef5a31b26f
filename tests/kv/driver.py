"""Drives a KVStore by random operations beside a model of it that knows no slots, only token sequences.

A sequence that ends may leave its partly filled tail. What leaves is checked against the definition: of all chunks that
nobody uses, those worth least at that moment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cellar.kv.conversations import MIN_IDLE_SECONDS
from cellar.kv.identity import Chain
from cellar.kv.policy import LeastRecentlyUsed, RetentionValue
from cellar.kv.store import KVStore

CHUNK = 3
COSTS = {1: 1.0, 8: 6.0, 64: 40.0}
Path = tuple[bytes, tuple[int, ...]]
"""What a chunk, or a tail, holds: the salt, and all tokens up to its end."""
Op = tuple[str, int, int, int]
KINDS = ("open", "open", "commit", "commit", "extend", "release", "release", "forget", "withdraw")


@dataclass(eq=False)
class Held:
    """A sequence with memory. `paths[c]` is None while chunk c is its own and has no identity."""

    tokens: np.ndarray
    salt: bytes
    slots: np.ndarray
    paths: list[Path | None]
    chain: Chain
    talk: int
    conversation: int


@dataclass
class Kept:
    """A chunk: how many sequences use it, the conversations it belongs to, and whether another followed it."""

    users: int
    talks: set[int]
    grown: bool = False


@dataclass
class Model:
    """The store by definition: what is there, who uses it, what it is worth, and how many slots are free."""

    num_slots: int
    values: bool
    now: float = 0.0
    kept: dict[Path, Kept] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    seen: dict[Path, None] = field(default_factory=dict)
    active: dict[int, float] = field(default_factory=dict)
    serial: dict[int, int] = field(default_factory=dict)
    named: dict[tuple[bytes, str], int] = field(default_factory=dict)
    evictions: int = 0

    def __post_init__(self) -> None:
        self.store = KVStore(
            self.num_slots, CHUNK, policy=RetentionValue(COSTS) if self.values else LeastRecentlyUsed()
        )
        self.free = self.num_slots
        self.talks = 0

    # -- operations -------------------------------------------------------------------------------

    def do(self, op: Op) -> None:
        kind, a, b, c = op
        self.now += (0.0, 0.1, 0.1, 0.2, 0.3, 3.0, 40.0)[(a + b + c) % 7]
        if kind == "open":
            self.open(a, b, c)
        elif self.held:
            held = self.held[a % len(self.held)]
            getattr(self, kind)(held, b)
        self.check()

    def open(self, a: int, b: int, c: int) -> None:
        rng = random.Random(a % 4)
        family = [rng.randrange(5) for _ in range(20)]
        tokens = np.array([*family[: b % 21], c % 3, c % 5, c % 2][: 1 + c % 21], np.int32)
        salt = b"" if a % 8 else b"other"
        name = (salt, "named") if b % 5 == 0 else None
        keep_free = c % 3
        num_chunks = -(-len(tokens) // CHUNK)
        hits = [self.hit(tokens, salt, i) for i in range(num_chunks)]
        chain = self.store.chain(salt)
        found = self.store.find(chain, tokens)
        assert [s >= 0 for s in found.slot.tolist()] == [p is not None for p in hits], "the answer is per chunk"
        there = [p for p in hits if p is not None]
        missing = num_chunks - len(there)
        left = self.free + self.num_cached - sum(not self.kept[p].users for p in there) - missing
        reservation = self.store.reserve(found, len(tokens), keep_free, name=name, now=self.now)
        assert (reservation is None) == (left < keep_free)
        if reservation is None:
            return
        talk = self.talk(there, name)
        before = self.keys()  # its conversation is active from now on
        for path in there:
            before.pop(path, None)
            self.kept[path].users += 1
        self.take(missing, before)
        for path in there:
            self.kept[path].talks.add(talk)
        state = Held(
            tokens,
            salt,
            reservation.slots,
            hits,
            chain,
            talk,
            reservation.conversation,
        )
        computed = {p for start, stop in reservation.compute for p in range(start, stop)}
        assert sum(stop - start for start, stop in reservation.compute) == len(computed)
        expected = {p for p in range(len(tokens)) if (hit := hits[p // CHUNK]) is None or len(hit[1]) <= p}
        assert computed == expected, "exactly what is not resident is computed"
        assert reservation.num_cached_tokens == len(tokens) - len(expected)
        assert list(reservation.compute) == sorted(reservation.compute)
        assert all(b < c for (_, b), (c, _) in zip(reservation.compute, reservation.compute[1:], strict=False))
        assert reservation.slots[: len(found.slot)][found.slot >= 0].tolist() == found.slot[found.slot >= 0].tolist()
        assert not reservation.awaits
        self.held.append(state)

    def extend(self, held: Held, b: int) -> None:
        count = b % 4
        room = self.free + self.num_cached
        before = self.keys()
        slots = self.store.extend(count, self.now)
        assert (slots is None) == (room < count)
        if slots is not None:
            self.take(count, before)
            more = np.array([(b * 7 + i) % 5 for i in range(count * CHUNK)], np.int32)
            whole = len(held.slots) * CHUNK
            held.tokens = np.concatenate((held.tokens, more[: whole - len(held.tokens)], more))[: whole + count * CHUNK]
            if len(held.tokens) < whole:
                held.tokens = np.concatenate((held.tokens, np.zeros(whole - len(held.tokens), np.int32)))
            held.slots = np.concatenate((held.slots, slots))
            held.paths += [None] * count

    def commit(self, held: Held, b: int) -> None:
        whole = len(held.tokens) // CHUNK
        upto = b % (whole + 1)
        first = b // 7 % (upto + 1)
        held.chain.grow(held.tokens, upto)
        self.store.names.commit(held.slots[first:upto].tolist(), held.chain, first, held.conversation)
        for i in range(first, upto):
            path = self.path(held.tokens, held.salt, i)
            if (held.paths[i] is None or is_tail(held.paths[i])) and path not in self.kept:
                self.name(held, i, path)
            if i and (parent := self.path(held.tokens, held.salt, i - 1)) in self.kept:
                self.kept[parent].grown = True

    def name(self, held: Held, column: int, path: Path) -> None:
        """A chunk of a sequence is found as this from now on, and no more as the tail that it was."""
        self.kept.pop(held.paths[column], None)  # type: ignore[arg-type]
        users = self.users(held.slots[column])
        for other, its in users:
            other.paths[its] = path
        self.kept[path] = Kept(len(users), {held.talk})
        self.seen[path] = None

    def keep_tail(self, held: Held, b: int) -> None:
        """The sequence ends within a chunk; no other who uses that has it as a whole one."""
        count = max(1, len(held.tokens) - b % CHUNK)
        column = count // CHUNK
        if column == len(held.slots):
            return
        held.chain.grow(held.tokens, column)
        self.store.names.keep_tail(int(held.slots[column]), held.chain, held.tokens[:count], held.conversation)
        path, before = (held.salt, tuple(held.tokens[:count].tolist())), held.paths[column]
        if is_tail(path) and path not in self.kept and (before is None or is_tail(before)):
            self.name(held, column, path)

    def release(self, held: Held, b: int) -> None:
        if b % 2:
            self.keep_tail(held, b // 2)
        self.store.release(held.slots, held.conversation, self.now)
        self.held.remove(held)
        self.touch(held.talk)
        for path, slot in zip(held.paths, held.slots.tolist(), strict=True):
            if path is None:
                self.free += not self.users(slot)
            else:
                self.kept[path].users -= 1

    def forget(self, held: Held, b: int) -> None:
        first = b % (len(held.paths) + 1)
        self.store.forget(held.slots[first:])
        for i in range(first, len(held.paths)):
            path = held.paths[i]
            if path is not None and self.kept[path].users == 1:
                del self.kept[path]
                held.paths[i] = None

    def withdraw(self, held: Held, b: int) -> None:
        """The whole conversation is forgotten; what it shares is its no more."""
        self.store.forget_conversations([held.conversation])
        for path, kept in list(self.kept.items()):
            kept.talks.discard(held.talk)
            if not kept.talks:
                del self.kept[path]
                for other in self.held:
                    other.paths = [None if p == path else p for p in other.paths]
                self.free += not kept.users

    # -- the model --------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        return sum(not kept.users for kept in self.kept.values())

    def users(self, slot: int) -> list[tuple[Held, int]]:
        """Who holds a slot, and as which of its chunks; several may hold one whose conversation was withdrawn."""
        return [(held, column) for held in self.held for column in np.flatnonzero(held.slots == slot).tolist()]

    def path(self, tokens: np.ndarray, salt: bytes, chunk: int) -> Path:
        return salt, tuple(tokens[: (chunk + 1) * CHUNK].tolist())

    def hit(self, tokens: np.ndarray, salt: bytes, chunk: int) -> Path | None:
        """What is there of a chunk: all of it, if it is not the last, or the longest tail, unless that is in use."""
        path = self.path(tokens, salt, chunk)
        if (chunk + 1) * CHUNK < len(tokens) and path in self.kept:
            return path
        known = [(salt, tuple(tokens[:n].tolist())) for n in range(chunk * CHUNK + 1, len(tokens))]
        tails = [tail for tail in known[: CHUNK - 1] if tail in self.kept]
        return tails[-1] if tails and not self.kept[tails[-1]].users else None

    def talk(self, there: list[Path], name: tuple[bytes, str] | None) -> int:
        """The conversation of that name, or of the deepest chunk if that is its end, or a new one."""
        alive = {held.talk for held in self.held}.union(*(kept.talks for kept in self.kept.values()))
        if name is not None and self.named.get(name) in alive:
            talk = self.named[name]
        elif name is None and there and not self.kept[there[-1]].grown:
            talk = max(self.kept[there[-1]].talks, key=lambda t: self.serial[t])
        else:
            self.talks += 1
            talk = self.talks
            if name is not None:
                self.named[name] = talk
        self.touch(talk)
        return talk

    def touch(self, talk: int) -> None:
        self.active[talk] = self.now
        self.serial[talk] = 1 + max(self.serial.values(), default=0)

    def keys(self) -> dict[Path, tuple[float, int, int]]:
        """Of all chunks that nobody uses: value, moment of last use, context. The smallest go first."""
        found = {}
        for path, kept in self.kept.items():
            if not kept.users:
                idle = [max(self.now - self.active[t], MIN_IDLE_SECONDS) for t in kept.talks]
                cost = float(np.interp(len(path[1]), list(COSTS), list(COSTS.values())))
                value = cost * sum(1 / t for t in idle) if self.values else 1 / min(idle)
                found[path] = round(value, 9), max(self.serial[t] for t in kept.talks), len(path[1])
        return found

    def take(self, count: int, keys: dict[Path, tuple[float, int, int]]) -> None:
        """Free slots go first, then the chunks worth least: which they are is seen by looking."""
        lost = [path for path in keys if not self.resident(path)]
        assert len(lost) == max(0, count - self.free), "no more is lost than is needed"
        self.free = max(0, self.free - count)
        assert sorted(keys[path] for path in lost) == sorted(keys.values())[: len(lost)], "not the least went"
        self.evictions += len(lost)
        for path in lost:
            del self.kept[path]

    def resident(self, path: Path) -> bool:
        salt, tokens = path
        return self.slot(salt, tokens) >= 0

    def slot(self, salt: bytes, tokens: tuple[int, ...]) -> int:
        """Where a chunk, or a tail that nobody uses, is found; -1 if it is not."""
        found = self.store.find(self.store.chain(salt), np.array([*tokens, 0], np.int32))
        last = (len(tokens) - 1) // CHUNK
        return int(found.slot[last]) if found.tokens[last] == len(tokens) - last * CHUNK else -1

    def check(self) -> None:
        references = np.zeros(self.num_slots, np.int32)
        for held in self.held:
            assert len(set(held.slots.tolist())) == len(held.slots)
            references[held.slots] += 1
        self.store.check_integrity(references)
        stats = self.store.stats()
        assert (stats.free, stats.cached) == (self.free, self.num_cached)
        assert stats.free + stats.cached + stats.referenced == stats.total == self.num_slots
        slot_of: dict[Path, int] = {}
        for salt, tokens in self.seen:
            slot, kept = self.slot(salt, tokens), self.kept.get((salt, tokens))
            free = kept is not None and not (kept.users and is_tail((salt, tokens)))
            assert (slot >= 0) == free, "what is resident is found, and nothing else"
            if slot >= 0:
                slot_of[salt, tokens] = slot
        assert len(set(slot_of.values())) == len(slot_of)
        for held in self.held:
            for path, slot in zip(held.paths, held.slots.tolist(), strict=True):
                whole = path is not None and not is_tail(path)
                assert not whole or slot_of[path] == slot  # type: ignore[index]
                assert whole or slot not in slot_of.values(), "a private chunk is nobody's answer"


def is_tail(path: Path) -> bool:
    """True if it ends within a chunk."""
    return len(path[1]) % CHUNK > 0


def drive(num_slots: int, ops: Sequence[Op], values: bool = False) -> Model:
    """Do all operations, then release everything."""
    model = Model(num_slots, values)
    for op in ops:
        model.do(op)
    for held in list(model.held):
        model.release(held, 0)
        model.check()
    assert model.store.num_available == num_slots
    return model


def random_case(seed: int, num_ops: int = 60) -> tuple[int, list[Op], bool]:
    """A size, operations and a policy drawn from a seed."""
    rng = random.Random(seed)
    draw = rng.randrange
    ops = [(rng.choice(KINDS), draw(256), draw(256), draw(256)) for _ in range(num_ops)]
    return rng.choice((2, 4, 6, 11, 20)), ops, rng.random() < 0.5
