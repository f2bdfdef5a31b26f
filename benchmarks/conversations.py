"""How long an operation of the conversation store takes while many do some at once, and what a sweep holds up.

    python -m benchmarks.conversations [--writers 64] [--seconds 10] [--store DIRECTORY_OR_URL] [--rate 0]

Every writer is a coroutine that lives through turns: read the history, begin a response in its conversation, append an
event, finish with 80 ids and an answer, list the items. Without `--rate` each begins its next operation at once, so the
store is as busy as it can be; with it, all together begin so many a second. Prints percentiles per operation; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from cellar.conversations import conversations, events, items, responses
from cellar.conversations.records import Event, Item, Response, Status, Tokens
from cellar.conversations.store import AsyncStore, open_store

ANSWER = "The cellar was cold and dark, and the wine in it was older than the house itself. " * 3


class Clock:
    """Times of operations, in seconds."""

    def __init__(self, rate: float) -> None:
        self.taken: dict[str, list[float]] = {}
        self._pause = 1 / rate if rate else 0.0
        self._next = time.perf_counter()

    async def __call__(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do something in its turn, and note how long it took."""
        if self._pause:
            self._next = max(self._next + self._pause, time.perf_counter() - 1.0)
            await asyncio.sleep(self._next - time.perf_counter())
        begun = time.perf_counter()
        result = await work()
        self.taken.setdefault(name, []).append(time.perf_counter() - begun)
        return result


def _message(id: str, role: str) -> Item:
    return Item(id, {"id": id, "type": "message", "role": role, "content": [{"type": "input_text", "text": ANSWER}]})


async def _live(store: AsyncStore, k: int, until: float, timed: Clock) -> None:
    owner, turn = f"owner-{k % 4}", 0
    conversation = f"conv_{os.getpid()}_{k}_{turn}"
    while time.perf_counter() < until:
        if turn % 10 == 0:
            conversation = f"conv_{os.getpid()}_{k}_{turn}"
            await timed("create", lambda c=conversation: store.write(conversations.create, owner, c, {"title": "Wine"}))  # type: ignore[misc]
        id = f"resp_{os.getpid()}_{k}_{turn}"
        past = await timed("history", lambda c=conversation: store.read(conversations.history, owner, c))  # type: ignore[misc]
        body = {"id": id, "object": "response", "model": "benchmark", "temperature": 1.0, "metadata": {}}
        made = Response(
            id, owner, Status.IN_PROGRESS, time.time(), body, conversation, input=(_message(f"{id}-in", "user"),)
        )
        await timed("begin", lambda r=made: store.write(responses.begin, r))  # type: ignore[misc]
        await timed("append", lambda i=id: store.write(events.append, owner, i, [Event(0, b"x" * 200)]))  # type: ignore[misc]
        tokens = Tokens(np.arange(80, dtype=np.int32), None if past.tokens is None else past.tokens.base, 40)
        output = [_message(f"{id}-out", "assistant")]
        await timed(
            "finish",
            lambda i=id, o=output, t=tokens, b=body: store.write(  # type: ignore[misc]
                responses.finish, owner, i, Status.COMPLETED, b, o, t
            ),
        )
        await timed("items", lambda c=conversation: store.read(items.page, owner, c))  # type: ignore[misc]
        turn += 1


async def _measure(place: str, writers: int, seconds: float, rate: float) -> dict[str, Any]:
    store = AsyncStore(await asyncio.to_thread(open_store, place))
    timed = Clock(rate)
    begun, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_live(store, k, begun + seconds, timed) for k in range(writers)))
    elapsed, busy = time.perf_counter() - begun, time.process_time() - busy
    await store.close()
    found: dict[str, Any] = {}
    for name, taken in {**timed.taken, "all": [t for one in timed.taken.values() for t in one]}.items():
        p50, p99, p999 = (1e3 * float(q) for q in np.quantile(taken, [0.5, 0.99, 0.999]))
        found[name] = {"count": len(taken), "p50_ms": p50, "p99_ms": p99, "p999_ms": p999}
        print(f"{name:8} {len(taken):7} operations   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   p99.9 {p999:7.2f} ms")
    count = found["all"]["count"]
    found |= {"operations_per_second": count / elapsed, "cpu_us_per_operation": 1e6 * busy / count}
    print(f"{count / elapsed:.0f} operations a second, {1e6 * busy / count:.0f} us of processors each")
    return found


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="operations a second of all together; 0: as many as can be"
    )
    parser.add_argument("--store", default=None, help="a directory or a PostgreSQL URL; default: a temporary directory")
    options = parser.parse_args()
    gc.collect()  # as a server does once it is ready: modules are not walked over again and again
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(_measure(options.store or directory, options.writers, options.seconds, options.rate))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
