"""A random driver of the whole engine, in this process: whatever company a request has, its tokens are those of a run
alone, and nothing is kept of one that was dropped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cellar import AsyncLLM, SamplingParams
from cellar.engine.outputs import Delta
from tests.fake_front import continuation, engine_of, open_fake
from tests.limits import asked, until

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass
class Tally:
    """Requests answered whole, dropped by their client, and answered with other tokens than alone."""

    whole: int = 0
    dropped: int = 0
    wrong: int = 0


def drive(seed: int, go_on: Callable[[int], bool], *, at_once: int = 24) -> Tally:
    """Random requests with shared beginnings over small random pools while `go_on(count)`. Raises IntegrityError."""
    rng, tally = random.Random(seed), Tally()
    opened, runtime = open_fake(
        num_slots=rng.choice((18, 30, 64)),
        num_rows=rng.choice((2, 5, 12)),
        delay=rng.choice((0, 1, 3)),
        caching=rng.random() < 0.8,
        policy=rng.choice(("fcfs", "priority")),
    )
    stems = [[rng.randrange(3, 90) for _ in range(rng.randrange(1, 120))] for _ in range(6)]
    engine, started = engine_of(opened), 0

    async def one(llm: AsyncLLM) -> None:
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(3, 90) for _ in range(rng.randrange(9))]
        count = rng.randrange(1, 200 - len(prompt))
        params = GREEDY.clone(max_tokens=count, n=rng.choice((1, 1, 1, 3)))
        leave_after = rng.randrange(count) if rng.random() < 0.3 else None
        salt = rng.choice((b"", b"a", b"b"))
        conversation = rng.choice((None, "x", "y"))
        seen = 0
        news = llm.deltas(prompt, params, priority=rng.randrange(3), conversation=conversation, salt=salt)
        last: Any = None
        async for last in news:
            seen += len(last.token_ids) if isinstance(last, Delta) else 0
            if leave_after is not None and seen > leave_after:
                await news.aclose()  # type: ignore[attr-defined]
                tally.dropped += 1
                return
        tally.whole += 1
        alone = continuation(prompt, count, runtime.vocab_size)
        while len(alone) < count:  # past end symbols
            alone += continuation(prompt + alone, count - len(alone), runtime.vocab_size)
        tally.wrong += any(list(output.token_ids) != alone for output in last.outputs)

    async def run() -> None:
        nonlocal started
        async with AsyncLLM.over(opened) as llm:
            running: set[asyncio.Task[None]] = set()
            while go_on(started):
                while len(running) < at_once:
                    started += 1
                    running.add(asyncio.create_task(one(llm)))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            for task in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(task, BaseException):
                    raise task
            await asyncio.to_thread(until, lambda: not engine.has_work())
            await asyncio.to_thread(asked, engine, engine.scheduler.check_integrity)
            stats = await asyncio.to_thread(asked, engine, engine.stats)
            assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
            assert (stats.running, stats.waiting) == (0, 0)

    asyncio.run(run())
    return tally
