"""Links of the simulator, against times that a person can compute: chunks of 10 bytes in 5 layers, 10 bytes/s in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.messages import CopyBatch, Tier
from cellar.planner.machines import a100
from cellar.simulate.link import Link, LinkModel

IN_AND_OUT = LinkModel(load_rate=10.0, save_rate=5.0, layerwise=False)


def batch(number: int, chunks: int, inwards: bool, lead: float = 0.0) -> CopyBatch:
    slots = np.arange(chunks, dtype=np.int32)
    tiers = (Tier.HOST, Tier.DEVICE) if inwards else (Tier.DEVICE, Tier.HOST)
    return CopyBatch(number, tiers[0], slots, tiers[1], slots, lead=lead)


def told(link: Link, until: float = np.inf) -> dict[int, float]:
    """When each batch was told of, up to a moment; without one, until nothing is on its way."""
    found = {}
    while (at := min(until, link.next_time())) < np.inf:
        found |= {result.number: at for at, result in link.collect(at)}
        if at == until:
            break
    return found


def test_batches_of_one_direction_follow_one_another() -> None:
    link = Link(IN_AND_OUT, 10.0, 5)
    link.submit(batch(0, 2, True), 0.0)
    link.submit(batch(1, 3, True), 0.5)
    assert link.next_time() == 2.0
    assert told(link, 1.9) == {}
    assert told(link) == {0: 2.0, 1: 5.0}
    assert link.next_time() == np.inf
    link.submit(batch(2, 1, False), 7.0)
    ((at, result),) = link.collect(20.0)
    assert (at, result.seconds, result.nbytes, result.ok.tolist()) == (9.0, 2.0, 10, [True])
    assert link.busy == [5.0, 2.0]


def test_each_chunk_has_its_own_latency() -> None:
    link = Link(LinkModel(10.0, 10.0, chunk_seconds=0.25, layerwise=False), 10.0, 5)
    link.submit(batch(0, 4, True), 0.0)
    assert told(link) == {0: 5.0}


def test_what_goes_out_waits_for_what_comes_in() -> None:
    link = Link(IN_AND_OUT, 10.0, 5)
    link.submit(batch(0, 1, True), 0.0)
    link.submit(batch(1, 1, False), 0.0)
    link.submit(batch(2, 1, True), 0.5)
    assert told(link) == {0: 1.0, 2: 2.0, 1: 4.0}


def test_both_directions_at_once_slow_each_other() -> None:
    link = Link(LinkModel(10.0, 10.0, duplex=0.8, layerwise=False), 10.0, 5)
    link.submit(batch(0, 2, False), 0.0)  # has begun when the other comes
    link.submit(batch(1, 2, True), 1.0)
    found = told(link)
    assert found[0] == pytest.approx(1.0 + 1.0 / 0.8)
    # Of the load's two seconds one passed while both were busy, and 1.25 s took it.
    assert found[1] == pytest.approx(2.25 + 1.0)


def test_a_load_is_told_of_when_the_rest_takes_no_longer_than_its_lead() -> None:
    link = Link(LinkModel(10.0, 10.0), 10.0, 5)
    link.submit(batch(0, 5, True, lead=2.0), 0.0)
    link.submit(batch(1, 5, True), 0.0)
    assert told(link, 3.0) == {0: 3.0}
    assert link.last_layer(0, 3.0) == pytest.approx((1.0, 5.0))
    assert told(link) == {1: 10.0}, "without a lead at its end"


def test_layers_are_told_of_with_the_first_and_arrive_one_after_another() -> None:
    link = Link(LinkModel(10.0, 10.0), 10.0, 5)
    link.submit(batch(0, 5, True, lead=9.0), 0.0)
    link.submit(batch(1, 5, True, lead=9.0), 0.0)
    assert told(link, 1.0) == {0: 1.0}
    assert link.last_layer(0, 2.0) == pytest.approx((1.0, 5.0))
    assert link.last_layer(1, 2.0) is None
    assert told(link) == {1: pytest.approx(6.0)}
    assert link.last_layer(0, 5.0) is None
    assert link.ended == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.floats(0, 3), st.floats(0, 8)), min_size=1, max_size=12),
    st.sampled_from([0.5, 0.8, 1.0]),
    st.booleans(),
)
def test_every_batch_ends_once_and_no_sooner_than_its_bytes_allow(
    given_: list[tuple[int, bool, float, float]], duplex: float, layerwise: bool
) -> None:
    link = Link(LinkModel(10.0, 5.0, 0.1, duplex, layerwise), 10.0, 5)
    now, work, found = 0.0, [0.0, 0.0], {}
    for number, (chunks, inwards, pause, lead) in enumerate(given_):
        now += pause
        found |= told(link, now)
        link.submit(batch(number, chunks, inwards, lead), now)
        work[inwards] += chunks * (1.1 if inwards else 2.1)
    found |= told(link)
    assert sorted(found) == list(range(len(given_)))
    assert link.busy[0] >= work[True] - 1e-9
    assert link.busy[1] >= work[False] - 1e-9
    assert link.busy[0] <= work[True] / duplex + 1e-9
    loads = [found[k] for k, entry in enumerate(given_) if entry[1]]
    assert loads == sorted(loads)


def test_the_library_knows_the_link_of_a_machine() -> None:
    model = LinkModel.of_host(a100(), duplex=0.81)
    assert (model.load_rate, model.save_rate, model.duplex, model.layerwise) == (25e9, 25e9, 0.81, True)
    assert LinkModel.of_host(a100(), layerwise=False).duplex == 1.0
