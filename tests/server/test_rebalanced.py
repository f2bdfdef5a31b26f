"""An engine that joins a busy one: conversations that rest there go on at the new one, with what Redis has of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from cellar import LLM
from cellar.core.messages import RequestOutput
from cellar.server.endpoint import Address
from tests.limits import eventually
from tests.redis_server import redis_server
from tests.server.test_drained import CHOSEN, FIRST, WHOLE, Replicas, two

pytestmark = pytest.mark.long  # one of them needs Debian's redis-server, see scripts/setup-system

TALKS = 12
TURNS = 4


async def talked(replicas: Replicas, remote: bool) -> tuple[list[list[int]], list[RequestOutput], dict[str, float]]:
    """Conversations with one engine, which go on all at once when there are two.

    -> prompts and answers of all turns, and what was seen.
    """
    old, new = replicas.engines
    prompts: list[list[int]] = []
    answers: list[RequestOutput] = []
    where: dict[int, Address] = {}
    seen = dict.fromkeys(("moved", "moved back", "found after a move", "asked after a move"), 0.0)
    seconds: list[list[float]] = [[] for _ in range(TURNS)]

    async def one(talk: int, turn: int, history: list[int]) -> list[int]:
        begun = time.monotonic()
        asked = asyncio.create_task(replicas.ask(history, FIRST, talk))
        await asyncio.sleep(0.05)
        at = replicas.where(f"talk {talk}") or where.get(talk, old.address)
        answer = await asked
        seconds[turn].append(time.monotonic() - begun)
        before = where.get(talk, at)
        if at != before:
            seen["moved" if at == new.address else "moved back"] += 1
            seen["found after a move"] += answer.num_cached_tokens
            seen["asked after a move"] += len(history)
        where[talk] = at
        prompts.append(history)
        answers.append(answer)
        return [*history, *answer.outputs[0].token_ids, 7, 8]

    histories = [[talk + 300, *range(100, 100 + WHOLE)] for talk in range(TALKS)]
    for turn in range(TURNS):
        histories = list(await asyncio.gather(*(one(talk, turn, history) for talk, history in enumerate(histories))))
        if remote and turn + 1 < TURNS:
            await asyncio.sleep(2.5)  # what rests is written after two seconds
        if turn == 0:
            replicas.host.add(new.address)
            await eventually(lambda: len(replicas.host.addresses()) == 2)
    seen |= {f"mean seconds of turn {turn}": sum(each) / TALKS for turn, each in enumerate(seconds)}
    return prompts, answers, seen


@pytest.mark.parametrize("remote", [True, False])
def test_an_engine_that_joins_takes_over_conversations(
    remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Redis most go on elsewhere with what lay at the other; without it those alone for whom computing is less
    than waiting. Nobody's tokens change, and who has moved stays.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", "0123456789abcdef" * 2)
    with ExitStack() as ending:
        there = {"kv_remote": ending.enter_context(redis_server()).url, "kv_remote_size": 0.1} if remote else {}
        replicas = ending.enter_context(two(at_first=1, **there))
        prompts, answers, seen = asyncio.run(talked(replicas, remote))
    print(f"remote {remote}:", {name: round(value, 3) for name, value in seen.items()})
    if remote:
        assert seen["moved"] >= 1
        assert seen["found after a move"] > 0.6 * seen["asked after a move"]
    assert seen["moved back"] <= seen["moved"]
    with LLM(**CHOSEN) as llm:
        expected = llm.generate(prompts, FIRST)
    assert [turn.outputs[0].token_ids for turn in answers] == [output.outputs[0].token_ids for output in expected]
