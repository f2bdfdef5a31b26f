"""Digests and the table that they are turned around into, against plain sets."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.errors import ConfigError
from cellar.core.messages import Tier
from cellar.routing.columns import Columns, unpacked
from cellar.routing.digest import MAX_BITS, DigestKeeper, DigestShape, Keys, keys_of, positions
from cellar.routing.holdings import Holdings


def names(start: int, stop: int) -> list[bytes]:
    return [blake2b(b"%d" % k, digest_size=16).digest() for k in range(start, stop)]


def keys(*numbers: int) -> Keys:
    return keys_of([name for k in numbers for name in names(k, k + 1)])


SHAPE = DigestShape({Tier.DEVICE: 1 << 14, Tier.HOST: 1 << 14})
Chunks = st.sets(st.integers(0, 60))


@given(
    st.lists(
        st.tuples(st.integers(0, 69), Chunks, Chunks, st.booleans(), st.booleans()),
        max_size=30,
    )
)
def test_the_table_says_what_the_last_digest_that_came_said(
    pushes: list[tuple[int, set[int], set[int], bool, bool]],
) -> None:
    keepers = [DigestKeeper(SHAPE) for _ in range(70)]
    holdings = Holdings(SHAPE)
    for column in range(70):
        holdings.open(column)
    known: dict[int, tuple[set[int], set[int]]] = {}
    broken = set(range(70))
    for column, device, host, whole, lost in pushes:
        digest = keepers[column].digest({Tier.DEVICE: keys(*device), Tier.HOST: keys(*host)}, whole)
        if lost:
            broken.add(column)
            continue
        assert holdings.take(column, digest) == (digest.base is None or column not in broken)
        if digest.base is None or column not in broken:
            broken.discard(column)
            known[column] = device, host
    found = holdings.held(keys(*range(61)), 70)
    for column in range(70):
        device, host = known.get(column, (set(), set()))
        for tier, expected in ((Tier.DEVICE, device), (Tier.HOST, host - device)):
            where = found.get(tier, np.zeros((61, 70)))
            assert set(np.flatnonzero(where[:, column]).tolist()) == expected


def test_no_chunk_is_missed_and_few_are_seen_that_are_not_there() -> None:
    count = 20_000
    shape = DigestShape.of({Tier.DEVICE: count})
    holdings = Holdings(shape)
    holdings.open(0)
    digest = DigestKeeper(shape).digest({Tier.DEVICE: keys_of(names(0, count))})
    assert digest.nbytes <= 4 * count
    assert holdings.take(0, digest)
    assert holdings.held(keys_of(names(0, count)), 1)[Tier.DEVICE].all()
    false = float(holdings.held(keys_of(names(count, 2 * count)), 1)[Tier.DEVICE].mean())
    said = float(holdings.false_share(1)[Tier.DEVICE][0])
    assert false < 0.015
    assert said == pytest.approx(false, rel=0.2)


def test_a_digest_is_bounded_however_much_is_held() -> None:
    shape = DigestShape.of({Tier.DISK: 10_000_000})
    assert shape.bits == {Tier.DISK: MAX_BITS}
    random = np.random.default_rng(0)
    keeper = DigestKeeper(shape)
    first = keeper.digest({Tier.DISK: random.integers(0, 2**63, 100_000).astype(np.uint64)})
    second = keeper.digest({Tier.DISK: random.integers(0, 2**63, 100_000).astype(np.uint64)})
    assert first.base is None
    assert first.nbytes == second.nbytes == MAX_BITS // 8  # a delta would be longer
    few = keeper.digest({Tier.DISK: random.integers(0, 2**63, 100).astype(np.uint64)}, whole=False)
    assert few.nbytes <= MAX_BITS // 8


def test_a_small_change_is_a_small_delta() -> None:
    keeper = DigestKeeper(DigestShape.of({Tier.DEVICE: 30_000}))
    keeper.digest({Tier.DEVICE: keys_of(names(0, 20_000))})
    delta = keeper.digest({Tier.DEVICE: keys_of(names(100, 20_100))})
    assert delta.base == 1
    assert delta.nbytes <= 200 * 2 * 4


def test_other_shapes_are_refused() -> None:
    holdings = Holdings(SHAPE)
    holdings.open(0)
    other = DigestShape({Tier.DEVICE: 1 << 13, Tier.HOST: 1 << 14})
    with pytest.raises(ConfigError, match="DigestShape"):
        holdings.take(0, DigestKeeper(other).digest({}))
    with pytest.raises(ConfigError, match="power of two"):
        DigestShape({Tier.DEVICE: 1000})


def test_a_replica_that_is_gone_leaves_nothing() -> None:
    holdings = Holdings(SHAPE)
    holdings.open(3)
    holdings.take(3, DigestKeeper(SHAPE).digest({Tier.DEVICE: keys(1, 2)}))
    holdings.send(3, keys(5))
    holdings.close(3)
    assert not holdings.held(keys(1, 2, 5), 4)
    assert not holdings.false_share(4)[Tier.DEVICE].any()


def test_a_digest_replaces_the_one_before_it() -> None:
    holdings = Holdings(SHAPE)
    holdings.open(0)
    keeper = DigestKeeper(SHAPE)
    for held, whole in (((1, 2), True), ((2, 3), True), ((3, 4), False), ((4,), False)):
        assert holdings.take(0, keeper.digest({Tier.DEVICE: keys(*held)}, whole))
        found = holdings.held(keys(0, 1, 2, 3, 4), 1)[Tier.DEVICE]
        assert np.flatnonzero(found[:, 0]).tolist() == list(held)


def test_room_for_more_replicas_loses_nobody() -> None:
    holdings = Holdings(SHAPE)
    holdings.open(0)
    assert holdings.take(0, DigestKeeper(SHAPE).digest({Tier.DEVICE: keys(1, 2)}))
    holdings.send(0, keys(3))
    holdings.open(64)
    assert holdings.take(64, DigestKeeper(SHAPE).digest({Tier.DEVICE: keys(2)}))
    found = holdings.held(keys(1, 2, 3), 65)[Tier.DEVICE]
    assert found[:, 0].tolist() == [1, 1, 1]
    assert found[:, 64].tolist() == [0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), Chunks), max_size=12))
def test_columns_count_their_bits(changes: list[tuple[int, bool, set[int]]]) -> None:
    columns = Columns(1 << 10)
    for column, whole, chunks in changes:
        bits = np.zeros(1 << 10, np.bool_)
        bits[positions(keys(*chunks), 1 << 10).ravel()] = True
        if whole:
            columns.write(column, np.packbits(bits, bitorder="little"))
        else:
            columns.flip(column, np.flatnonzero(bits).astype(np.uint32))
        fill = unpacked(columns._words.T, 4).sum(0) / columns.num_bits
        assert np.allclose(columns.false_share(4), fill**2)
