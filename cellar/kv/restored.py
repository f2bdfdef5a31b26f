"""Restoring: chunks of an earlier process, found in tiers that outlive one, get their places on the shelves.

Whose they were is told by their chain: a chunk that no other follows is the end of a conversation, and those before it
belong to all conversations that go on from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cellar.core.messages import ChunkLabel, KeptChunk, Tier
from cellar.kv.conversations import MAX_MEMBERS
from cellar.kv.shelves import Shelves


def restore(shelves: Shelves, kept: Mapping[Tier, Sequence[KeptChunk]], now: float) -> None:
    """Take in what each tier has; `now` is the time of this process. The shelves must be empty."""
    ages: dict[bytes, float] = {}
    labels: dict[bytes, ChunkLabel] = {}
    for chunk in (chunk for chunks in kept.values() for chunk in chunks):
        identity = chunk.label.identity
        labels[identity] = chunk.label
        ages[identity] = min(chunk.age, ages.get(identity, chunk.age))
    if not labels:
        return
    numbers = enter(shelves, labels, ages, now)
    for tier, chunks in kept.items():
        _place(shelves, shelves.tiers.index(tier), chunks, numbers)
    shelves.leaving.classify(np.fromiter(numbers.values(), np.int32, len(numbers)))


def enter(
    shelves: Shelves, labels: Mapping[bytes, ChunkLabel], ages: Mapping[bytes, float], now: float
) -> dict[bytes, int]:
    """Enter chunks that lie nowhere yet, written `ages` seconds ago; -> their numbers by identity."""
    directory, conversations = shelves.directory, shelves.conversations
    followed = {label.parent for label in labels.values()}
    ends = sorted((i for i in labels if i not in followed), key=lambda i: -ages[i])  # the most recent last
    members: dict[bytes, set[int]] = {i: {conversations.restored(labels[i].owner, now - ages[i])} for i in ends}
    audiences: dict[tuple[int, ...], int] = {}
    numbers: dict[bytes, int] = {}
    grown: list[bytes] = []
    for label in sorted(labels.values(), key=lambda label: -label.end):  # what follows comes before
        mine = tuple(sorted(members[label.identity]))
        if label.parent in labels:
            before = members.setdefault(label.parent, set())
            before.update(mine[: MAX_MEMBERS + 1 - len(before)])  # one more than an audience has is a crowd
        if mine not in audiences:
            audiences[mine] = conversations.shared(mine, now - ages[label.identity])
        audience = audiences[mine]
        if label.tokens:
            number = directory.add_tail(label.identity, label.parent, label.tokens, label.end, audience)
        else:
            number = int(directory.add([label.identity], [label.parent], np.array([label.end]), audience)[0])
            if label.parent in labels:
                grown.append(label.parent)
        conversations.count(audience, 1)
        numbers[label.identity] = number
    directory.grown[[numbers[parent] for parent in grown]] = True
    return numbers


def _place(shelves: Shelves, tier: int, chunks: Sequence[KeptChunk], numbers: Mapping[bytes, int]) -> None:
    """Give the chunks of one tier their slots. Of a chunk that lies there twice the second is erased."""
    pool, held = shelves.pools[tier], shelves.directory.slot[tier]
    twice: list[int] = []
    slots: list[int] = []
    for chunk in chunks:
        number = numbers[chunk.label.identity]
        if held[number] >= 0:
            twice.append(chunk.slot)
        else:
            held[number] = chunk.slot
            slots.append(chunk.slot)
    taken = np.array(slots, np.int32)
    chunk_of = {int(held[number]): number for number in numbers.values() if held[number] >= 0}
    pool.occupy(taken, np.array([chunk_of[slot] for slot in slots], np.int32))
    extra = np.array(twice, np.int32)
    pool.occupy(extra, np.full(len(extra), -1, np.int32))
    pool.vacate(extra)
