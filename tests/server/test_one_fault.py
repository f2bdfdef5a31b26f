"""An exception that one request causes in the engine's loop ends that request, whatever raises it; others go on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.core.messages import RequestOutput
from cellar.engine.tables import LogprobStore
from cellar.text.detokenizer import ByteDetokenizer
from cellar.text.stops import StopMatcher
from tests.fake_front import open_fake
from tests.limits import asked, eventually
from tests.server.served import plain

PLANTED: dict[str, tuple[type, str, dict[str, Any]]] = {
    "detokenizer": (ByteDetokenizer, "push", {}),
    "last text": (ByteDetokenizer, "flush", {}),
    "stop strings": (StopMatcher, "push", {"stop": "zyzyzy"}),
    "log-probabilities": (LogprobStore, "append", {"logprobs": 2}),
    "scores": (LogprobStore, "append", {"prompt_logprobs": 2}),
}


@pytest.mark.parametrize("where", PLANTED)
def test_a_fault_in_what_one_request_needs_ends_it_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then what is made for some requests raises: they end with an error, or with all their tokens."""
    kind, method, asks = PLANTED[where]
    original, draw, faults = getattr(kind, method), random.Random(1), []

    def faulty(self: Any, *arguments: Any) -> Any:
        if draw.random() < 0.02:
            faults.append(1)
            raise ZeroDivisionError("planted")
        return original(self, *arguments)

    async def one(llm: AsyncLLM, k: int) -> RequestOutput:
        own = asks if k % 2 else {"detokenize": False}
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=1 + k % 3, **own)
        return [output async for output in llm.generate([k + 3, k + 4, k + 5], params)][-1]

    async def run() -> None:
        opened, _ = open_fake(num_slots=40)
        llm = AsyncLLM.over(opened)
        monkeypatch.setattr(kind, method, faulty)
        outputs = await asyncio.gather(*(one(llm, k) for k in range(40)))
        monkeypatch.undo()
        ended = 0
        for k, output in enumerate(outputs):
            for made in output.outputs:
                if made.finish_reason == "error":
                    ended += 1
                    assert k % 2 == 1, "another's fault"
                    assert "planted" in str(made.stop_reason)
                else:
                    assert made.token_ids == plain([k + 3, k + 4, k + 5], 30)
        assert ended
        assert len(faults) >= ended
        engine = opened.front.engine
        await eventually(lambda: not engine.has_work())
        asked(engine, engine.scheduler.check_integrity)  # type: ignore[attr-defined]
        await asyncio.to_thread(llm.close)

    asyncio.run(run())
