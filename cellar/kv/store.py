"""KVStore: which chunks of which sequences are resident, and where; gives orders, moves no byte (Pensieve §3.4.3).

The scheduler asks what is there (`find`), gets memory (`reserve`, `extend`), says what has become of it (`commit`,
`release`, `forget`), hands on the copies that were decided (`copies`) and brings their results (`commit_copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyBatch, CopyResult, EngineRates, KeptChunk, Tier, TierOrder, TierStats
from cellar.kv.departure import Departure
from cellar.kv.foreign import Foreign
from cellar.kv.identity import Chain, Recalled, owner_identity, salted_identity
from cellar.kv.movement import Movement
from cellar.kv.names import Names
from cellar.kv.policy import LeastRecentlyUsed, Policy
from cellar.kv.pool import Chunks, Slots
from cellar.kv.recovery import Recovery
from cellar.kv.restored import restore
from cellar.kv.shelves import NO_SLOTS, Shelves
from cellar.kv.states import LOADING, PRIVATE, RESIDENT

_TOKEN_BYTES = np.dtype(np.int32).itemsize
_NO_CHUNK = np.full(1, -1, np.int32)


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the chunks of a sequence are, one element per chunk; the last may be partly filled. -1: nowhere.

    chunk   its number in the directory; for a column that no whole chunk fills, the tail it begins with
    tokens  how many of its tokens are there: all, those of a tail, or 0
    tier    the fastest tier that has it, by its place on the shelves
    slot    its slot there       state   that slot's state: RESIDENT, SAVING, or LOADING if it is on its way
    """

    chunk: Chunks
    tokens: NDArray[np.int32]
    tier: NDArray[np.int8]
    slot: Slots
    state: NDArray[np.int8]

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return int(self.tokens.sum())

    def first(self, count: int) -> Residency:
        """Of the first `count` chunks alone."""
        chunk, tokens, tier = self.chunk[:count], self.tokens[:count], self.tier[:count]
        return Residency(chunk, tokens, tier, self.slot[:count], self.state[:count])


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory for a sequence: the slot of each of its chunks, and how they get their content.

    `compute` are the half-open ranges of positions that are nowhere, ascending; what lies between them is resident, or
    will be once the batches `awaits` have ended well. `conversation` is the one that the sequence belongs to. `hits`
    are the cached tokens by the tier that has them (by place on the shelves), `num_recomputed` those of `compute` that
    lie before cached ones or that a slower tier has.
    """

    slots: Slots
    compute: tuple[tuple[int, int], ...]
    num_cached_tokens: int
    conversation: int
    awaits: frozenset[int] = frozenset()
    hits: tuple[int, ...] = ()
    num_recomputed: int = 0


class KVStore:
    """Chunks of `chunk_size` tokens: `num_slots` on the device, and `tiers` says how many in each slower tier.

    `root` is what all identities begin with: see `identity.root_identity`. Without slower tiers a chunk that is
    reclaimed is lost, and nothing is copied: a tail that is being written on in is not found meanwhile. `policy` says
    what goes first, `recovery` what is loaded and what is computed again.
    """

    def __init__(
        self,
        num_slots: int,
        chunk_size: int,
        root: bytes = b"",
        tiers: Mapping[Tier, int] | None = None,
        policy: Policy | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        self.chunk_size = chunk_size
        self.recovery = recovery or Recovery()
        self._root = root
        self._recalled = Recalled()
        self._shelves = Shelves({Tier.DEVICE: num_slots, **(tiers or {})}, policy or LeastRecentlyUsed())
        self._movement = Movement(self._shelves)
        self.names = Names(self._shelves, chunk_size)
        self.foreign = Foreign(self._shelves, chunk_size, self.chain)
        self.departure = Departure(self._shelves, self._movement, self.rates)
        self._has_tiers = len(self._shelves.tiers) > 1
        self._hurries = False  # the last call for copies had those alone that had been decided
        self.put_off = False  # the last reservation: there was memory, but what it holds is copied out first

    @property
    def num_available(self) -> int:
        """Slots of the device that a reservation could get: free ones, and those of chunks that nobody uses."""
        return self._shelves.num_available(0)

    @property
    def num_moving(self) -> int:
        """Batches of copies under way."""
        return self._movement.num_moving

    @property
    def num_returning(self) -> int:
        """Slots of the device that could be reclaimed once copies under way have ended."""
        return self._movement.num_returning

    def chain(self, salt: bytes) -> Chain:
        """An empty chain of identities for one sequence; only equal salts share."""
        return Chain(salted_identity(self._root, salt), self.chunk_size, self._recalled)

    # -- what is there ----------------------------------------------------------------------------

    def find(self, chain: Chain, tokens: NDArray[np.int32]) -> Residency:
        """Where the chunks of `tokens` [n] are; it goes on past missing ones.

        At least the last token is left to be computed, since its logits are needed: all chunks before it, and what
        tails hold of the others.
        """
        size = self.chunk_size
        whole = (len(tokens) - 1) // size
        directory = self._shelves.directory
        chunks = directory.find(chain.grow(tokens, whole)[:whole])
        columns = [k for k in (*np.flatnonzero(chunks < 0).tolist(), whole) if directory.has_tail(chain.parent(k))]
        if not columns and (not whole or chunks.max() < 0):
            return _nowhere(whole + 1)
        chunks = np.concatenate((chunks, _NO_CHUNK))
        filled = np.where(chunks >= 0, np.int32(size), np.int32(0))
        for column in columns:
            begin = column * size
            held = tokens[begin : min(begin + size, len(tokens) - 1)].tobytes()
            chunk, nbytes = directory.find_tail(chain.parent(column), held)
            if self._has_tiers or self._is_free_to_write(np.array([chunk])).all():
                chunks[column], filled[column] = chunk, nbytes // _TOKEN_BYTES
        return self._residency(chunks, filled)

    def _residency(self, chunks: Chunks, filled: NDArray[np.int32]) -> Residency:
        shelves = self._shelves
        tier = np.full(len(chunks), -1, np.int8)
        slot = np.full(len(chunks), -1, np.int32)
        state = np.zeros(len(chunks), np.int8)
        there = chunks >= 0
        for number in reversed(range(len(shelves.tiers))):
            slots = shelves.directory.slot[number, chunks]
            here = there & (slots >= 0)
            if number:  # only the device's slots can be waited for
                here &= shelves.resident(number, chunks)
            tier[here], slot[here] = number, slots[here]
            state[here] = shelves.pools[number].state[slots[here]]
        coming = there & (tier < 0)  # its source was lost while it was copied outwards
        chunks[coming], filled[coming] = -1, 0
        return Residency(chunks, filled, tier, slot, state)

    # -- memory for sequences ---------------------------------------------------------------------

    def reserve(
        self,
        found: Residency | None,
        num_tokens: int,
        keep_free: int = 0,
        *,
        name: tuple[bytes, str] | None = None,
        tenant: str = "",
        now: float = 0.0,
        before: Sequence[tuple[int, int]] = (),
        step_tokens: int = 0,
        patience: float = 0.0,
    ) -> Reservation | None:
        """References on what was found on the device, and new slots for the rest of `num_tokens` tokens.

        What other tiers hold is loaded, or computed again if the request ends earlier so; the ranges `before` of other
        sequences are to be computed before it, and a step computes `step_tokens` of its own. `name` is the
        conversation's; without one the sequence belongs to that of the deepest chunk that it extends. `tenant`: whose
        it is, if anybody's. None, and nobody's memory is changed, if fewer than `keep_free` slots would stay available,
        or it is `put_off`: chunks would be lost that are copied out in less than `patience` times the seconds in which
        they are computed again.
        """
        shelves, size = self._shelves, self.chunk_size
        slots = np.full(-(-num_tokens // size), -1, np.int32)
        filled = np.zeros(len(slots), np.int32)
        load = np.zeros(len(slots), np.bool_)
        chunks = NO_SLOTS
        known = 0
        hit_tokens = np.zeros(len(shelves.tiers), np.int64)
        if found is not None and (found.chunk >= 0).any():
            known = int(np.flatnonzero(found.chunk >= 0)[-1]) * size + int(found.tokens[found.chunk >= 0][-1])
            there, chunks = found.chunk >= 0, found.chunk[found.chunk >= 0]
            at_once = there & (found.tier == 0) & ((found.tokens == size) | self._is_free_to_write(found.chunk))
            slots[: len(there)][at_once] = found.slot[at_once]
            load[: len(there)] = wanted = self._wanted(found, there & ~at_once, found.slot[at_once], now, before)
            filled[: len(there)] = np.where(at_once | wanted, found.tokens, 0)
            hits_of = at_once | wanted
            hit_tokens += np.bincount(found.tier[hits_of], found.tokens[hits_of], len(hit_tokens)).astype(np.int64)
        hits = slots[slots >= 0]
        new = (slots < 0) & ~load
        loads = int(np.count_nonzero(load))
        needed = len(slots) - len(hits)
        available = shelves.num_available(0)
        left = available - (int(np.count_nonzero(shelves.leaving.may(0, hits))) if len(hits) else 0)
        if left - needed < keep_free:
            self.put_off = False
            return None
        missing = needed - shelves.num_without_loss(hits) if patience and self._has_tiers else 0
        again = patience * self.recovery.least_seconds(missing)
        self.put_off = self._movement.puts_off(missing, available - keep_free, again, loads > 0, now)
        if self.put_off:
            return None
        inherited = self._inherited(found) if found is not None and len(chunks) and name is None else -1
        owner = owner_identity(*name) if name is not None else b""
        conversation = shelves.conversations.join(owner, inherited, now, tenant)
        shelves.hold(hits)  # before taking, or a hit could be reclaimed
        awaits = {self._movement.fills(slot) for slot in hits.tolist()} if self._has_tiers else set()
        slots[new] = self._take(needed - loads, PRIVATE, now)
        compute = _ranges(filled, size, num_tokens)
        if found is not None and loads:
            slots[load] = self._take(loads, LOADING, now)
            lead = self.recovery.lead(compute, size, step_tokens)
            awaits |= self._load(found, load[: len(found.chunk)], slots, now, lead)
        if len(chunks):
            shelves.share(chunks, conversation, now)
        awaits.discard(-1)
        cached = int(filled.sum())
        return Reservation(
            slots=slots,
            compute=compute,
            num_cached_tokens=cached,
            conversation=conversation,
            awaits=frozenset(awaits),
            hits=tuple(hit_tokens.tolist()),
            num_recomputed=known - cached,
        )

    def measured(self, prompts: NDArray[np.int32], seconds: float) -> None:
        """A step that computed the ranges `prompts` [n, 2] of sequences, besides decodes, took so long (0: unknown)."""
        if seconds > 0:
            self.recovery.measured(self.recovery.total(prompts, self.chunk_size), seconds)

    def rates(self) -> EngineRates:
        """How fast computing and loads were so far."""
        links = zip(self._shelves.tiers[1:], self._movement.links[1:], strict=True)
        load = {tier: link.rate() for tier, link in links if link.known}
        return EngineRates(self.recovery.seconds_per_cost or 0.0, self.recovery.decode_seconds, load)

    def extend(self, count: int, now: float = 0.0) -> Slots | None:
        """`count` new slots for chunks to be computed, or None (and no change)."""
        if count > self._shelves.num_available(0):
            return None
        return self._take(count, PRIVATE, now)

    def release(self, slots: Slots, conversation: int, now: float = 0.0) -> None:
        """A sequence ends: one reference less on each of its chunks; those with an identity stay cached."""
        shelves = self._shelves
        shelves.conversations.leave(conversation, now)
        chunks = shelves.device.chunk[slots]
        shelves.drop(slots)
        shelves.leaving.find_out()  # now, rather than when the next request comes
        self._movement.behind.add(chunks[chunks >= 0], now)

    def forget(self, slots: Slots) -> None:
        """Chunks that turned out not to count, or to be wrong, lose their identity in every tier and in copies under
        way, unless others use them.
        """
        device = self._shelves.device
        chunks = device.chunk[slots[device.references[slots] == 1]]
        self._shelves.remove(chunks[chunks >= 0])

    # -- conversations ----------------------------------------------------------------------------

    def named(self, conversation: str) -> list[int]:
        """Numbers of the conversations that clients call so."""
        return self._shelves.conversations.named(conversation)

    def memory(self, conversations: Sequence[int]) -> dict[Tier, int]:
        """Tokens whose K and V lie in each tier, counted where they are read from fastest."""
        shelves, directory = self._shelves, self._shelves.directory
        none = [NO_SLOTS]
        chunks = np.unique(np.concatenate(none + [shelves.held_by(number) for number in conversations]))
        filled = np.full(len(chunks), self.chunk_size)
        for k, chunk in enumerate(chunks.tolist()):
            if directory.is_tail(chunk):
                filled[k] = directory.end[chunk] % self.chunk_size
        found = {}
        for number, tier in enumerate(shelves.tiers):
            here = shelves.resident(number, chunks)
            found[tier] = int(filled[here].sum())
            chunks, filled = chunks[~here], filled[~here]
        return found

    def forget_conversations(self, conversations: Sequence[int], keep: Chunks = NO_SLOTS) -> None:
        """Their chunks are found no more, in any tier or copy under way, unless other conversations share them, or they
        are among those to `keep`.

        Nothing of them is left in a tier that outlives the process when `num_erasing` has come to 0.
        """
        self._recalled.clear()
        for number in conversations:
            self._shelves.withdraw(number, keep)

    def holding(self, contexts: Iterable[tuple[bytes, NDArray[np.int32]]]) -> Chunks:
        """The chunks that contexts (salt, tokens [n]) consist of, tails too, as far as they lie anywhere."""
        directory, size, found = self._shelves.directory, self.chunk_size, list[int]()
        for salt, tokens in contexts:
            chain, whole = self.chain(salt), len(tokens) // size
            found += directory.find(chain.grow(tokens, whole)[:whole]).tolist()
            found.append(directory.find_tail(chain.parent(whole), tokens[whole * size :].tobytes())[0])
        chunks = np.unique(np.array(found, np.int32))
        return chunks[chunks >= 0]

    def pin(self, conversations: Sequence[int], until: float) -> None:
        """What they have, shared or not, leaves a tier after all that is not pinned, until then. A conversation that
        has nothing any more, and of which no request runs, loses its pin.
        """
        for number in conversations:
            self._shelves.conversations.pin(number, until)

    # -- what outlives a request, and a process ---------------------------------------------------

    def restore(self, kept: Mapping[Tier, Sequence[KeptChunk]], now: float) -> None:
        """Chunks that tiers have from before this process are found from now on; to be called first of all."""
        restore(self._shelves, kept, now)

    def flush(self, tier: Tier) -> int:
        """Drop all that a tier holds and nobody uses; -> how many chunks. What other tiers hold of them stays."""
        shelves = self._shelves
        number = shelves.tiers.index(tier)
        pool = shelves.pools[number]
        slots = np.flatnonzero(pool.state == RESIDENT).astype(np.int32)
        chunks = pool.chunk[slots[pool.unused(slots)]]
        shelves.clear(number, chunks, erase=True)
        shelves.leaving.find_out()
        return len(chunks)

    @property
    def num_erasing(self) -> int:
        """Slots of tiers that outlive the process with something left of a chunk that was forgotten."""
        return self._movement.num_erasing

    # -- copies -----------------------------------------------------------------------------------

    def save(self, slots: Slots, now: float = 0.0) -> None:
        """Copy what is on the device alone to the next tier, as far as there is room: its sequence was suspended."""
        self._movement.save(slots, now)

    def copies(self, now: float) -> Sequence[TierOrder]:
        """Copies decided since the last call, with those that memory pressure and rest ask for."""
        if not self._has_tiers:
            return ()
        orders = self._movement.orders()
        loads = any(isinstance(order, CopyBatch) and order.target is Tier.DEVICE for order in orders)
        self._hurries = loads and not self._hurries
        if self._hurries:
            return orders  # somebody waits for them; what else is to be copied is decided with the next call
        self._movement.balance(now)
        return (*orders, *self._movement.orders())

    def persist(self, now: float) -> Sequence[TierOrder]:
        """Copies of what this process alone has to a tier that outlives it; none when all is safe, or moving."""
        if not self._has_tiers:
            return ()
        self.departure.persist(now)
        return self._movement.orders()

    def next_moment(self) -> float | None:
        """When `copies` will have something to decide, though nothing else happens; None: never."""
        return self._movement.next_moment()

    def commit_copy(self, result: CopyResult, now: float | None = None) -> Slots:
        """Take in a result; -> slots that sequences wait for and that hold nothing: the load of their chunk failed."""
        return self._movement.commit(result, now)

    # -- counts -----------------------------------------------------------------------------------

    def keys(self) -> dict[Tier, NDArray[np.uint64]]:
        """The first 64 bits of the identities of the chunks that can be read in each tier."""
        shelves, found = self._shelves, {}
        for number, tier in enumerate(shelves.tiers):
            chunks = np.flatnonzero(shelves.directory.slot[number] >= 0).astype(np.int32)
            found[tier] = shelves.directory.key[chunks[shelves.resident(number, chunks)]]
        return found

    def stats(self) -> TierStats:
        """Of the device's tier; O(1)."""
        return self._stats(0)

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Of every tier, the fastest first."""
        return tuple(self._stats(number) for number in range(len(self._shelves.tiers)))

    def _stats(self, tier: int) -> TierStats:
        pool = self._shelves.pools[tier]
        free, referenced = pool.num_free, pool.num_referenced
        moved = self._movement.moved[tier]
        return TierStats(
            tier=pool.tier,
            total=pool.num_slots,
            free=free,
            cached=pool.num_slots - free - referenced,
            referenced=referenced,
            loaded=moved.loaded,
            saved=moved.saved,
            failed=moved.failed,
            load_seconds=moved.load_seconds,
            save_seconds=moved.save_seconds,
            load_nbytes=moved.load_nbytes,
            save_nbytes=moved.save_nbytes,
        )

    def check_integrity(self, references: NDArray[np.int32] | None = None) -> None:
        """Raise IntegrityError unless in every tier free + cached + referenced == total, slots and chunks map one to
        one, what may leave is what nobody uses, and (if given) `references` [num_slots], the users of each slot of the
        device as its owner counts them, are true.
        """
        self._shelves.check(references, self._movement.pins())

    # -- parts ------------------------------------------------------------------------------------

    def _take(self, count: int, state: int, now: float) -> Slots:
        slots = self._shelves.take(0, count, state, now)
        if slots is None:
            raise IntegrityError(f"{count} slots were counted as available, but could not be taken")
        self._shelves.device.hold(slots)
        return slots

    def _is_free_to_write(self, chunks: Chunks) -> NDArray[np.bool_]:
        """Which chunks lie in slots of the device that a sequence may take for itself and write on in; not for -1."""
        device = self._shelves.device
        slots = self._shelves.directory.slot[0, chunks]
        free: NDArray[np.bool_] = (slots >= 0) & device.unused(slots) & (device.state[slots] == RESIDENT)
        return free

    def _wanted(
        self,
        found: Residency,
        columns: NDArray[np.bool_],
        hits: Slots,
        now: float,
        before: Sequence[tuple[int, int]],
    ) -> NDArray[np.bool_]:
        """Which of the chunks in `columns` to load; the others are computed again. `hits` are used as they are, and
        awaited where another sequence loads them.
        """
        wanted = columns.copy()
        places = np.flatnonzero(columns)
        if len(places) and self.recovery.rule != "load":
            recovery, movement = self.recovery, self._movement
            begins = places * self.chunk_size
            cost = recovery.cost(begins, begins + found.tokens[places], self.chunk_size)
            busy = recovery.total(np.array(before, np.int32).reshape(-1, 2), self.chunk_size) * (
                recovery.seconds_per_cost or 0.0
            )
            coming = {movement.fills(slot) for slot in hits.tolist()}
            floor = max([busy, *(movement.seconds_until(batch, now) for batch in coming)])
            wanted[places] = recovery.loads(found.tier[places], cost, movement.links, now, floor)
        return wanted

    def _load(self, found: Residency, columns: NDArray[np.bool_], slots: Slots, now: float, lead: float) -> set[int]:
        """Have the chunks in `columns` copied to their new slots; -> the batches."""
        batches = set()
        for tier in np.unique(found.tier[columns]).tolist():
            part = np.flatnonzero(columns & (found.tier == tier))
            # A copy of a tail is its sequence's own, to be written on in; the tail stays where it is.
            chunks = np.where(found.tokens[part] == self.chunk_size, found.chunk[part], np.int32(-1))
            whole = part[chunks >= 0]
            self._shelves.expect(slots[whole], found.chunk[whole])
            batches.add(self._movement.load(tier, found.slot[part], slots[part], chunks, now, lead))
        return batches

    def _inherited(self, found: Residency) -> int:
        """The conversation of the deepest of the chunks that were found, if it ends there: all else is a fork."""
        deepest = int(found.chunk[np.flatnonzero(found.chunk >= 0)[-1]])
        if self._shelves.directory.grown[deepest]:
            return -1
        return self._shelves.conversations.latest(int(self._shelves.directory.audience[deepest]))


def _nowhere(count: int) -> Residency:
    """Of chunks none of which is anywhere."""
    none = np.full(count, -1, np.int32)
    nothing = np.zeros(count, np.int32)
    return Residency(none, nothing, none.astype(np.int8), none, nothing.astype(np.int8))


def _ranges(filled: NDArray[np.int32], chunk_size: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """What is to be computed of chunks that begin with so many tokens each; the last may end within a chunk."""
    if num_tokens and not filled.any():
        return ((0, num_tokens),)
    begins = np.arange(len(filled)) * chunk_size
    ends = np.minimum(begins + chunk_size, num_tokens)
    begins = begins + filled
    missing = begins < ends
    begins, ends = begins[missing], ends[missing]
    if not len(begins):
        return ()
    apart = begins[1:] > ends[:-1]
    begins, ends = begins[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]
    return tuple(zip(begins.tolist(), ends.tolist(), strict=True))
