"""The router among engines: each says what it holds and how busy it is, so fronts agree that do not know each other."""

from __future__ import annotations

import asyncio
import copy
import time
from functools import partial

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.messages import EngineRates, Outlook, Request, Tier
from cellar.routing.basis import ASSUMED_SECONDS, Basis
from cellar.routing.digest import DigestShape
from cellar.routing.report import ReplicaReport
from cellar.routing.router import Why
from cellar.server.pool.affinity import Affinity
from cellar.server.pool.host import PoolHost
from cellar.server.reports import Reports
from cellar.server.routing_figures import RoutingFigures
from cellar.server.tally import Tally
from tests.fake_front import ROOMY
from tests.limits import SECONDS, asked, eventually, until
from tests.server.fake_process import attach
from tests.server.test_pool import Engines, tokens_of

SHAPE = DigestShape.of({Tier.DEVICE: 1024, Tier.HOST: 2048})


def basis(root: bytes | None = b"") -> Basis:
    return Basis(root, 16, {1: 100.0, 1024: 300.0}, SHAPE)


@pytest.mark.long
def test_another_front_finds_what_a_conversation_left() -> None:
    """No conversation is named: by what engines say the second front knows where chunks lie, and by nothing else."""
    engines = Engines(3)
    other = PoolHost(partial(attach, latency=0.01, **ROOMY))
    other.count_by(RoutingFigures(tally := Tally()))
    for engine in engines.running:
        other.add(engine.address)
    until(lambda: len(other.addresses()) == 3)
    chooser = other._pool._chooser
    assert isinstance(chooser, Affinity)

    def knows(prompt: list[int]) -> bool:
        """Would it choose by chunks now? Engines that are merely busy differ in costs, too."""
        assert chooser._basis is not None
        sent = Request("a", np.array(prompt, np.int32), SamplingParams(), frozenset(), 60)
        router = copy.deepcopy(chooser._router)
        assert router is not None
        return router.choose(chooser._basis.request(sent), time.monotonic()).why is Why.CHUNKS

    async def run() -> None:
        llm = other.llm
        assert llm is not None
        for k in range(4):
            prompt = [k + 3, *range(3, 80)]
            await asyncio.wait_for(tokens_of(engines.llm, prompt), SECONDS)
            await asyncio.to_thread(until, lambda prompt=prompt: asked(other._pool, lambda: knows(prompt)))
            before = other.stats()
            assert before is not None
            await asyncio.wait_for(tokens_of(llm, prompt), SECONDS)
            await eventually(
                lambda before=before: (now := other.stats()) is not None and now.prefix_hits - before.prefix_hits >= 64
            )

    asyncio.run(run())
    assert tally.counts()["router_choices/chunks"] == 4
    other.leave()
    engines.close()


def test_load_is_spread_and_what_is_asked_together_goes_everywhere() -> None:
    engines = Engines(3)

    async def run() -> None:
        streams = [asyncio.create_task(tokens_of(engines.llm, [k + 3, 5, k])) for k in range(12)]
        await eventually(lambda: sum(len(place.streams) for place in engines.host._pool.places) == 12)
        assert [len(place.streams) for place in engines.host._pool.places] == [4, 4, 4]
        await asyncio.wait_for(asyncio.gather(*streams), SECONDS)

    asyncio.run(run())
    chooser = engines.host._pool._chooser
    assert isinstance(chooser, Affinity)
    assert not chooser._numbers
    engines.close()


def test_prices_follow_from_what_an_engine_has_learned() -> None:
    assert basis().prices(EngineRates()).chunks(1)[0] == pytest.approx(ASSUMED_SECONDS, rel=0.1)
    prices = basis().prices(EngineRates(1e-6, 0.02, {Tier.HOST: (0.001, 2e-5)}))
    assert prices.compute == pytest.approx({1: 1e-4, 1024: 3e-4})
    assert (prices.load[Tier.HOST].fixed, prices.load[Tier.HOST].per_chunk) == (0.001, 2e-5)
    assert prices.step.fixed == 0.02
    assert prices.step.per_row == pytest.approx(1e-4 / 16)
    assert prices.step.per_token == pytest.approx(2e-4 / 1023 / 16)


def test_what_the_router_is_told_of_a_request() -> None:
    request = Request(
        "a", np.arange(40, dtype=np.int32), SamplingParams(), frozenset(), 7, conversation="x", salt=b"mine"
    )
    told = basis().request(request)
    assert (told.prompt_tokens, len(told.chunks), told.max_tokens) == (40, 2, 7)
    assert told.session is not None
    bare = basis(None).request(request)
    assert (bare.prompt_tokens, bare.chunks, bare.session) == (40, (), None)


def test_reports_come_when_something_has_happened_and_no_more_often_than_each_second() -> None:
    rates = EngineRates(1e-6)
    outlook = Outlook(np.array([[0, 32]], np.int32), 1, 32, 0, 0, 100, {}, rates)
    told: list[tuple[ReplicaReport, EngineRates]] = []
    reports = Reports(lambda: outlook, basis())
    reports.turned(True, 0.0)
    assert reports.patience(0.0) is None  # nobody wants any
    reports.watch("a", SHAPE, lambda *one: told.append(one))
    assert reports.patience(0.0) == 0.0
    reports.turned(False, 0.0)
    assert [(report.digest.base, said) for report, said in told] == [(None, rates)]
    assert told[0][0].waiting_seconds == pytest.approx(basis().prices(rates).ranges(outlook.pending))
    reports.turned(False, 5.0)
    assert reports.patience(5.0) is None
    reports.turned(True, 5.5)
    reports.turned(True, 5.6)
    assert len(told) == 2
    assert reports.patience(5.6) == pytest.approx(0.9)
    assert told[1][0].digest.base == told[0][0].digest.version
    reports.watch("b", SHAPE, lambda *one: None)
    reports.turned(False, 5.7)  # who is new needs a whole digest, at once
    assert told[2][0].digest.base is None
    for key in ("a", "b", "a stranger"):
        reports.leave(key)
    reports.turned(True, 9.0)
    assert len(told) == 3
    assert reports.patience(9.0) is None


def test_figures() -> None:
    tally = Tally()
    figures = RoutingFigures(tally)
    figures.chosen(Why.CHUNKS, 3e-4)
    figures.migrated(4)
    samples = {
        (sample.name, sample.labels.get("reason")): sample.value
        for family in figures.families({"model_name": "m"}, tally.counts())
        for sample in family.samples
    }
    assert samples["cellar:requests_migrated_total", None] == 4
    assert samples["cellar:router_choices_total", "chunks"] == 1
    assert samples["cellar:router_choices_total", "load"] == 0
    assert samples["cellar:router_choice_seconds_count", None] == 1


def test_a_single_engine_is_chosen_without_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a prompt's length, nothing of it is looked at while there is nobody to choose from."""
    engines = Engines(1)
    engines.host.count_by(RoutingFigures(tally := Tally()))

    def never(*arguments: object) -> None:
        raise AssertionError("there was nothing to choose")

    monkeypatch.setattr(Basis, "request", never)
    said = asyncio.run(tokens_of(engines.llm, [3, 5]))
    assert len(said) == len(asyncio.run(tokens_of(engines.llm, list(range(3, 80)))))
    assert tally.counts()["router_choices/only"] == 2
    engines.close()
