"""Structured output through scheduler, masker and device: run-ahead, suspensions, aborts, late grammars."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from typing import Any

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.messages import RequestOutput
from cellar.core.sampling import StructuredOutputsParams
from cellar.runtime.steps.fake import FakeRuntime
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from tests.fake_front import open_fake
from tests.limits import SECONDS, asked, eventually
from tests.server.served import TEXT, VOCAB, plain


def opened_with_masks(masker: Masker | None = None, **fake: Any) -> tuple[AsyncLLM, Any, FakeRuntime]:
    opened, runtime = open_fake(masker=masker or Masker(GrammarCompiler(TEXT, VOCAB, (2,))), **fake)
    return AsyncLLM.over(opened), opened.front.engine, runtime


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


@pytest.mark.parametrize("seed", range(3))
def test_suspended_rows_go_on_where_their_grammar_stood(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        delays = random.Random(seed)  # of the engine's thread
        llm, engine, _ = opened_with_masks(num_slots=20, num_rows=6, delay=lambda step: delays.choice([0, 0, 1, 2]))

        async def one(k: int) -> None:
            prompt = [k + 3] * rng.randrange(1, 40)
            count = rng.randrange(20, 60)
            if k % 3 == 0:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                assert (await last(llm, prompt, params)).outputs[0].token_ids == plain(prompt, count)
                return
            wanted = StructuredOutputsParams(regex=f"([a-z]{{{count}}}|[0-9]{{{count}}})")
            stop = {"stop": "q"} if k % 3 == 2 else {}
            params = SamplingParams(
                temperature=0,
                max_tokens=150,
                n=1 + k % 2,
                structured_outputs=wanted,
                logprobs=1 if k % 5 == 0 else None,
                prompt_logprobs=1 if k % 7 == 0 else None,
                **stop,
            )
            for made in (await last(llm, prompt, params)).outputs:
                assert made.finish_reason == "stop"
                if made.stop_reason == "q":
                    assert re.fullmatch("[a-z]*", made.text)
                else:
                    assert re.fullmatch(f"[a-z]{{{count}}}|[0-9]{{{count}}}", made.text), made

        await asyncio.gather(*(one(k) for k in range(40)))
        assert engine.stats().preemptions > 0
        await eventually(lambda: not engine.has_work())
        asked(engine, engine.scheduler.check_integrity)
        await asyncio.to_thread(llm.close)

    asyncio.run(run())


def test_a_request_dropped_while_its_grammar_compiles_never_starts() -> None:
    go = threading.Event()

    class Slow(GrammarCompiler):
        def compile(self, wanted: StructuredOutputsParams) -> Any:
            assert go.wait(SECONDS)
            return super().compile(wanted)

    async def run() -> None:
        llm, engine, runtime = opened_with_masks(Masker(Slow(TEXT, VOCAB, (2,))))
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a{9}"), max_tokens=20)
        dropped = asyncio.create_task(last(llm, [5], params))
        kept = asyncio.create_task(last(llm, [6], params))
        # Others go on meanwhile.
        beside = await last(llm, [7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        assert beside.outputs[0].token_ids == plain([7], 9)
        await eventually(lambda: len(engine.companion._held) == 2)
        assert asked(engine, engine.has_work)
        dropped.cancel()
        await eventually(lambda: len(engine.companion._held) == 1, SECONDS / 2)
        go.set()
        assert (await kept).outputs[0].text == "a" * 9
        await eventually(lambda: not engine.has_work())
        assert engine.stats().prompt_tokens == 2
        assert runtime.in_flight == 0
        await asyncio.to_thread(llm.close)

    asyncio.run(run())


def test_a_failed_step_and_a_grammar_that_does_not_compile_end_their_requests_only() -> None:
    async def run() -> None:
        llm, engine, _ = opened_with_masks(nan=lambda step, row: row == 0 and step == 4)
        wanted = StructuredOutputsParams(regex="[ab]{30}")
        params = SamplingParams(temperature=0, structured_outputs=wanted, max_tokens=60)
        bad = params.clone(structured_outputs=StructuredOutputsParams(grammar="start: x"))
        found = await asyncio.gather(*(last(llm, [k], params) for k in (4, 5, 6)), last(llm, [7], bad))
        reasons = [output.outputs[0].finish_reason for output in found]
        assert sorted(map(str, reasons)) == ["error", "error", "stop", "stop"]
        assert reasons[3] == "error"
        assert "cannot be enforced" in str(found[3].outputs[0].stop_reason)
        for output in found[:3]:
            made = output.outputs[0]
            assert made.finish_reason == "error" or re.fullmatch("[ab]{30}", made.text)
        await eventually(lambda: not engine.has_work())
        await asyncio.to_thread(llm.close)

    asyncio.run(run())


@pytest.mark.parametrize("where", ["mask", "consume", "copy"])
def test_a_matcher_that_fails_ends_its_request_only(where: str) -> None:
    class Failing(GrammarCompiler):
        def compile(self, wanted: StructuredOutputsParams) -> Any:
            return _Broken(super().compile(wanted), where if wanted.text == "[ab]{12}" else "")

    class _Broken:
        def __init__(self, inner: Any, where: str) -> None:
            self.inner, self.where = inner, where

        def mask(self) -> Any:
            return self._do("mask")

        def consume(self, token: int) -> None:
            self._do("consume", token)

        def copy(self) -> Any:
            return _Broken(self._do("copy"), self.where)

        def _do(self, name: str, *arguments: int) -> Any:
            if name == self.where:
                raise ZeroDivisionError("a defect of a grammar")
            return getattr(self.inner, name)(*arguments)

    async def run() -> None:
        llm, engine, _ = opened_with_masks(Masker(Failing(TEXT, VOCAB, (2,))))
        made = [
            SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=regex))
            for regex in ("[ab]{12}", "[cd]{12}", "[ab]{12}", "[ef]{12}")
        ]
        outputs = await asyncio.gather(*(last(llm, [k + 3], params) for k, params in enumerate(made)))
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "stop", "error", "stop"]
        assert re.fullmatch("[cd]{12}", outputs[1].outputs[0].text)
        assert "not finite" in str(outputs[0].outputs[0].stop_reason)
        await eventually(lambda: not engine.has_work())
        asked(engine, engine.scheduler.check_integrity)
        await asyncio.to_thread(llm.close)

    asyncio.run(run())
