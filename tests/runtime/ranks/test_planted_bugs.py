"""Bugs planted into the group, each of which the tests beside this file must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import CellarError, DeviceError, IntegrityError
from cellar.core.messages import CopyResult
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks import group
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.star import Star
from tests.runtime.ranks import test_ranks as tests

Plant = Callable[[pytest.MonkeyPatch], None]
Proof = Callable[[list[RankGroup]], None]

BUGS: dict[str, tuple[Plant, Proof]] = {}


def bug(proof: Proof) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[plant.__name__] = plant, proof
        return plant

    return register


@bug(lambda opened: tests.test_a_decode_step_on_several_ranks_is_that_of_one(2, opened))
def a_sum_lacks_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    total = Star.sum
    patch.setattr(Star, "sum", lambda self, part: total(self, part if self.rank + 1 < self.size else 0 * part))


@bug(lambda opened: tests.test_a_decode_step_on_several_ranks_is_that_of_one(3, opened))
def ranks_sample_each_for_itself(patch: pytest.MonkeyPatch) -> None:
    share = Star.share
    patch.setattr(Star, "share", lambda self, values: share(self, values) + (self.rank == 2))


@bug(lambda opened: tests.test_a_rank_that_does_wrong_is_found("tokens", IntegrityError, "tokens of step 4"))
def answers_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group, "joined", lambda results, sampler=0: results[sampler])


@bug(lambda opened: tests.test_a_rank_that_does_wrong_is_found("step", IntegrityError, "answered step 5"))
def an_answer_counts_for_any_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RankGroup,
        "_awaited",
        lambda self, rank, result: next(awaited for awaited in self._steps if rank not in awaited.answers),
    )


@bug(lambda opened: tests.test_a_rank_that_does_wrong_is_found("death", DeviceError, "rank 1 has ended"))
def a_death_is_said_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("cellar.runtime.ranks.rank.Died", lambda number, *rest, **more: group.Died(0, *rest, **more))


@bug(lambda opened: tests.test_a_chunk_has_arrived_if_every_rank_has_its_shard(opened))
def a_chunk_has_arrived_if_one_rank_has_it(patch: pytest.MonkeyPatch) -> None:
    def any_ok(results: Any) -> CopyResult:
        return CopyResult(results[0].number, np.logical_or.reduce([result.ok for result in results]))

    patch.setattr(group, "copied", any_ok)


@bug(lambda opened: tests.test_capacity_is_the_least_of_all(opened))
def capacity_is_that_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    def first(capacities: Any) -> Capacity:
        found: Capacity = capacities[0]
        return found

    patch.setattr(group, "least", first)


@bug(lambda opened: tests.test_a_step_that_fails_on_one_rank_ends_its_requests_and_no_others(opened))
def only_rank_0_may_fail(patch: pytest.MonkeyPatch) -> None:
    whole = group.joined
    patch.setattr(group, "joined", lambda results, sampler=0: whole(results[:1]))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, proof = BUGS[name]
    opened: list[RankGroup] = []
    with monkeypatch.context() as patch:
        plant(patch)
        try:
            proof(opened)
        except (AssertionError, CellarError, pytest.fail.Exception):
            return
        finally:
            for one in opened:
                one.close()
    pytest.fail(f"{name} was not found")
