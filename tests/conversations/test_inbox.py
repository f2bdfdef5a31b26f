"""Results of threads in an event loop: many at a time, for who still waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from cellar.conversations.inbox import Inbox


def test_results_errors_and_who_waits_no_more() -> None:
    async def main() -> None:
        inbox = Inbox(asyncio.get_running_loop())
        futures: list[Future[Any]] = [Future() for _ in range(4)]
        waiting = [asyncio.ensure_future(inbox.result(future)) for future in futures]
        await asyncio.sleep(0)
        waiting[3].cancel()

        def answer() -> None:
            futures[0].set_result(0)
            futures[1].set_exception(ValueError("no"))
            futures[2].set_result(2)
            futures[3].set_result(3)

        await asyncio.to_thread(answer)
        assert await waiting[0] == 0
        with pytest.raises(ValueError, match="no"):
            await waiting[1]
        assert await waiting[2] == 2
        with pytest.raises(asyncio.CancelledError):
            await waiting[3]
        assert futures[3].result() == 3, "who stops waiting does not undo it"
        done: Future[int] = Future()
        done.set_result(7)
        assert await inbox.result(done) == 7

    asyncio.run(main())


def test_many_results_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        inbox, calls = Inbox(loop), [0]
        call = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            return call(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        futures: list[Future[int]] = [Future() for _ in range(64)]
        waiting = [asyncio.ensure_future(inbox.result(future)) for future in futures]
        await asyncio.sleep(0)
        for k, future in enumerate(futures):  # the loop does not turn meanwhile
            future.set_result(k)
        assert await asyncio.gather(*waiting) == list(range(64))
        return calls[0]

    assert asyncio.run(main()) == 1


def test_a_loop_that_is_closed_is_not_waited_for() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        waiting = asyncio.ensure_future(Inbox(asyncio.get_running_loop()).result(future))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    future.set_result(1)
    assert future.result() == 1
