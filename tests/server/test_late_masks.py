"""Masks that come late: the step goes on without them, and their requests wait alone."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.messages import RequestOutput
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine import masks as masks_module
from cellar.runtime.steps.fake import FakeRuntime
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from tests.fake_front import open_fake
from tests.limits import SECONDS, asked, eventually
from tests.server.served import TEXT, VOCAB, plain


@dataclass
class Hindered:
    """A matcher that calls `hinder` with the number of tokens it has seen, before each mask."""

    inner: Any
    hinder: Callable[[int], None]
    seen: int = 0

    def mask(self) -> Any:
        self.hinder(self.seen)
        return self.inner.mask()

    def consume(self, token: int) -> None:
        self.inner.consume(token)
        self.seen += 1

    def copy(self) -> Hindered:
        return Hindered(self.inner.copy(), self.hinder, self.seen)


class Hindering(GrammarCompiler):
    """Grammars whose text contains `where` are hindered."""

    def __init__(self, hinder: Callable[[int], None], where: str = "") -> None:
        super().__init__(TEXT, VOCAB, (2,))
        self.hinder, self.where = hinder, where

    def compile(self, constraint: StructuredOutputsParams) -> Any:
        inner = super().compile(constraint)
        return Hindered(inner, self.hinder) if self.where in constraint.text else inner


def opened(hinder: Callable[[int], None], where: str = "", **fake: Any) -> tuple[AsyncLLM, Any, FakeRuntime]:
    front, runtime = open_fake(masker=Masker(Hindering(hinder, where)), **fake)
    return AsyncLLM.over(front), front.front.engine, runtime


def following(regex: str, **more: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(regex=regex)
    return SamplingParams(max_tokens=60, structured_outputs=wanted, **{"temperature": 0, **more})


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params)][-1]


async def settled(llm: AsyncLLM, engine: Any) -> None:
    await eventually(lambda: not engine.has_work())
    asked(engine, engine.scheduler.check_integrity)
    await asyncio.to_thread(llm.close)


@pytest.mark.parametrize("caching", [True, False])
def test_a_late_mask_holds_up_its_own_row_only(caching: bool) -> None:
    """While it is computed others get all their tokens, and so do other rows with masks; then it goes on."""
    go = threading.Event()

    async def run() -> None:
        llm, engine, _ = opened(lambda seen: seen != 5 or go.wait(SECONDS) or None, "x", caching=caching)
        late = asyncio.ensure_future(last(llm, [3], following("x[ab]{12}")))
        await eventually(lambda: engine.stats().waiting == 1)
        quick = await asyncio.gather(last(llm, [4], following("[cd]{12}")), last(llm, [9], _free(40)))
        assert re.fullmatch("[cd]{12}", quick[0].outputs[0].text)
        assert quick[1].outputs[0].token_ids == plain([9], 40)
        assert not late.done()
        go.set()
        made = (await late).outputs[0]
        assert re.fullmatch("x[ab]{12}", made.text)
        assert made.finish_reason == "stop"
        await settled(llm, engine)

    asyncio.run(run())


def _free(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_what_waits_for_a_mask_can_be_dropped() -> None:
    go = threading.Event()

    async def run() -> None:
        llm, engine, _ = opened(lambda seen: seen != 3 or go.wait(SECONDS) or None)
        late = asyncio.ensure_future(last(llm, [3], following("[ab]{12}")))
        await eventually(lambda: engine.stats().waiting == 1)
        late.cancel()
        await eventually(lambda: not engine.has_work())
        again = asyncio.ensure_future(last(llm, [3], following("[ab]{12}")))
        go.set()
        assert re.fullmatch("[ab]{12}", (await again).outputs[0].text)
        await settled(llm, engine)

    asyncio.run(run())


def test_masks_that_take_too_long_end_their_request() -> None:
    """Also while one is computed that never comes back; the sentence says what to do."""
    go = threading.Event()

    async def run() -> None:
        llm, engine, _ = opened(lambda seen: seen != 3 or go.wait(SECONDS) or None, "x", mask_timeout=0.2)
        late, other = await asyncio.gather(
            last(llm, [3], following("x[ab]{12}")), last(llm, [4], following("[cd]{12}"))
        )
        assert late.outputs[0].finish_reason == "error"
        assert "masks have taken more than 0.2 s; make it less ambiguous" in str(late.outputs[0].stop_reason)
        assert re.fullmatch("[cd]{12}", other.outputs[0].text)
        go.set()
        await settled(llm, engine)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_late_masks_change_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes late, in whatever company and however little memory there is: the tokens are the same."""
    monkeypatch.setattr(masks_module, "STEP_SECONDS", 0.002)
    draw = random.Random(seed)

    def hinder(_: int) -> None:
        if draw.random() < 0.1:
            time.sleep(draw.choice((0.003, 0.006)))

    async def all_of(hinder: Callable[[int], None], **fake: Any) -> list[list[list[int]]]:
        llm, engine, _ = opened(hinder, num_rows=6, **fake)
        rng = random.Random(seed)
        asked_for = []
        for k in range(20):
            count = rng.randrange(10, 30)
            params = following(
                f"([a-z]{{{count}}}|[0-9]{{{count}}})",
                n=1 + k % 2,
                seed=k,
                temperature=k % 3 / 2,
                presence_penalty=0.5 if k % 4 == 0 else 0.0,
                logprobs=1 if k % 5 == 0 else None,
                prompt_logprobs=1 if k % 7 == 0 else None,
            )
            asked_for.append(last(llm, [k + 3] * rng.randrange(1, 40), params))
        outputs = await asyncio.gather(*asked_for)
        for output in outputs:
            for made in output.outputs:
                assert made.finish_reason == "stop"
                assert re.fullmatch("[a-z]+|[0-9]+", made.text), made.text
                assert made.logprobs is None or len(made.logprobs) == len(made.token_ids)
        await settled(llm, engine)
        return [[made.token_ids for made in output.outputs] for output in outputs]

    delays = random.Random(seed)
    late = asyncio.run(all_of(hinder, num_slots=20, delay=lambda step: delays.choice([0, 0, 1, 2])))
    assert late == asyncio.run(all_of(lambda _: None))


def test_a_slow_grammar_is_waited_for_once() -> None:
    """Its next rows are late at once; after some quick masks it is trusted again."""
    slow = threading.Event()
    slow.set()
    told: list[int | None] = []

    async def run() -> None:
        llm, engine, runtime = opened(lambda _: time.sleep(0.06) if slow.is_set() else None)
        supply = runtime.supply
        desk = engine.companion._desk

        def noted(step: int, masks: Any) -> None:
            told.extend(None if mask is None else 1 for mask in masks.values())
            supply(step, masks)

        desk._supply = noted
        made = (await last(llm, [3], following("[ab]{12}"))).outputs[0]
        assert re.fullmatch("[ab]{12}", made.text)
        assert told.count(None) >= 8
        assert desk._slowness
        slow.clear()
        for _ in range(4):
            await last(llm, [3], following("[ab]{12}"))
        assert not desk._slowness
        told.clear()
        await last(llm, [3], following("[ab]{12}"))
        await settled(llm, engine)

    asyncio.run(run())
