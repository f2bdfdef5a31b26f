"""Drives a KVStore by random operations beside a model of it that knows no slots, only token sequences."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cellar.kv.hashing import Chain
from cellar.kv.store import KVStore

CHUNK = 2
Path = tuple[bytes, tuple[int, ...]]
"""What a chunk holds: the salt, and all tokens up to its end."""
Op = tuple[str, int, int, int]
KINDS = ("open", "open", "commit", "commit", "extend", "release", "forget")


@dataclass(eq=False)
class Held:
    """A sequence with memory. `paths[c]` is None while chunk c is its own and has no identity."""

    tokens: np.ndarray
    salt: bytes
    slots: np.ndarray
    paths: list[Path | None]
    chain: Chain


class Model:
    """The store by definition: what is referenced, what is cached in which order, how many slots are free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.store = KVStore(num_slots, CHUNK)
        self.free = num_slots
        self.cached: OrderedDict[Path, None] = OrderedDict()
        self.references: dict[Path, int] = {}
        self.held: list[Held] = []
        self.seen: dict[Path, None] = {}

    # -- operations -------------------------------------------------------------------------------

    def do(self, op: Op) -> None:
        kind, a, b, c = op
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
        keep_free = c % 3
        num_chunks = -(-len(tokens) // CHUNK)
        paths = [self.path(tokens, salt, i) for i in range((len(tokens) - 1) // CHUNK)]
        hits = [p if self.resident(p) else None for p in paths]
        found = self.store.lookup(tokens, salt)
        assert [s >= 0 for s in found.tolist()] == [p is not None for p in hits], "lookup answers per chunk"
        missing = num_chunks - sum(p is not None for p in hits)
        left = self.free + len(self.cached) - sum(p in self.cached for p in hits) - missing
        reservation = self.store.reserve(found, len(tokens), keep_free)
        assert (reservation is None) == (left < keep_free)
        if reservation is None:
            return
        for path in hits:
            if path is not None:
                self.cached.pop(path, None)
                self.references[path] = self.references.get(path, 0) + 1
        self.take(missing)
        chain = self.store.chain(salt)
        state = Held(tokens, salt, reservation.slots, [*hits, *[None] * (num_chunks - len(hits))], chain)
        computed = {p for start, stop in reservation.compute for p in range(start, stop)}
        assert sum(stop - start for start, stop in reservation.compute) == len(computed)
        expected = {p for p in range(len(tokens)) if state.paths[p // CHUNK] is None}
        assert computed == expected, "exactly what is not resident is computed"
        assert reservation.num_cached_tokens == len(tokens) - len(expected)
        assert list(reservation.compute) == sorted(reservation.compute)
        assert reservation.slots[: len(found)][found >= 0].tolist() == found[found >= 0].tolist()
        self.held.append(state)

    def extend(self, held: Held, b: int) -> None:
        count = b % 4
        room = self.free + len(self.cached)
        slots = self.store.extend(count)
        assert (slots is None) == (room < count)
        if slots is not None:
            self.take(count)
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
        identities = held.chain.grow(held.tokens, upto)
        self.store.commit(held.slots[:upto].tolist(), identities[:upto])
        for i in range(upto):
            path = self.path(held.tokens, held.salt, i)
            if held.paths[i] is None and not self.resident(path):
                held.paths[i] = path
                self.references[path] = 1
                self.seen[path] = None

    def release(self, held: Held, b: int) -> None:
        self.store.release(held.slots)
        self.held.remove(held)
        for path in held.paths:
            if path is None:
                self.free += 1
            else:
                self.references[path] -= 1
                if not self.references[path]:
                    del self.references[path]
                    self.cached[path] = None

    def forget(self, held: Held, b: int) -> None:
        first = b % (len(held.paths) + 1)
        self.store.forget(held.slots[first:])
        for i in range(first, len(held.paths)):
            path = held.paths[i]
            if path is not None and self.references[path] == 1:
                del self.references[path]
                held.paths[i] = None

    # -- the model --------------------------------------------------------------------------------

    def path(self, tokens: np.ndarray, salt: bytes, chunk: int) -> Path:
        return salt, tuple(tokens[: (chunk + 1) * CHUNK].tolist())

    def resident(self, path: Path) -> bool:
        return path in self.cached or path in self.references

    def take(self, count: int) -> None:
        """Free slots first, then cached chunks, least recently used first."""
        for _ in range(count):
            if self.free:
                self.free -= 1
            else:
                self.cached.popitem(last=False)

    def check(self) -> None:
        references = np.zeros(self.num_slots, np.int32)
        for held in self.held:
            assert len(set(held.slots.tolist())) == len(held.slots)
            references[held.slots] += 1
        self.store.check_integrity(references)
        stats = self.store.stats()
        assert (stats.free, stats.cached) == (self.free, len(self.cached))
        assert stats.free + stats.cached + stats.referenced == stats.total == self.num_slots
        slot_of: dict[Path, int] = {}
        for salt, tokens in self.seen:
            found = self.store.lookup(np.array([*tokens, 0], np.int32), salt)
            assert (found[-1] >= 0) == self.resident((salt, tokens)), "what is resident is found, and nothing else"
            if found[-1] >= 0:
                slot_of[salt, tokens] = int(found[-1])
        assert len(set(slot_of.values())) == len(slot_of)
        for held in self.held:
            for path, slot in zip(held.paths, held.slots.tolist(), strict=True):
                assert path is None or slot_of[path] == slot
                assert path is not None or slot not in slot_of.values(), "a private chunk is nobody's answer"


def drive(num_slots: int, ops: Sequence[Op]) -> Model:
    """Do all operations, then release everything."""
    model = Model(num_slots)
    for op in ops:
        model.do(op)
    for held in list(model.held):
        model.release(held, 0)
        model.check()
    assert model.store.num_available == num_slots
    return model


def random_case(seed: int, num_ops: int = 60) -> tuple[int, list[Op]]:
    """A size and operations drawn from a seed."""
    rng = random.Random(seed)
    draw = rng.randrange
    return rng.choice((3, 12, 30)), [(rng.choice(KINDS), draw(256), draw(256), draw(256)) for _ in range(num_ops)]
