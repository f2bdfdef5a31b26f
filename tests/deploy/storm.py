"""Conversations on a Ray cluster whose engines are killed and replaced under them; with PostgreSQL and Redis.

    python -m tests.deploy.storm --talks 300 --turns 3 --kills 15

All conversations are held twice, undisturbed and disturbed, half of them greedy and half with a seed: the texts must be
the same, each stream without a gap or a repeat, and everything kept. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.conversations.postgres import cluster as postgres_cluster
from tests.deploy.cluster import Cluster, cluster
from tests.limits import eventually
from tests.redis_server import redis_server

ARGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 << 20,
    "kv_remote_size": 0.25,
    "num_threads": 1,
    "dtype": "float32",
    "served_model_name": "demo",
    "log_level": "warning",
}

FRONT = {"max_surge_percent": 100, "graceful_shutdown_timeout_s": 60}


@dataclass
class Talk:
    """A conversation: what was said in it, how long its turns took (seconds), how many tokens their prompts had and how
    many of these an engine had already.
    """

    number: int
    asked: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    id: str = ""

    def said(self) -> list[tuple[str, str]]:
        """Who said what, in order."""
        turns = zip(self.asked, self.answers, strict=True)
        return [said for question, answer in turns for said in (("user", question), ("assistant", answer))]


class Counts:
    """What fronts count of their choices. A front that is replaced begins anew, and both may answer for a while."""

    def __init__(self) -> None:
        self._lives: list[dict[str, float]] = []

    def saw(self, text: str) -> None:
        """A front's /metrics."""
        now = {
            sample.labels.get("reason", "moved"): sample.value
            for family in text_string_to_metric_families(text)
            if family.name in ("cellar:router_choices", "cellar:requests_migrated")
            for sample in family.samples
        }
        fitting = [life for life in self._lives if all(now[name] >= count for name, count in life.items())]
        if fitting:
            max(fitting, key=lambda life: sum(life.values())).update(now)
        else:
            self._lives.append(now)

    def total(self) -> dict[str, int]:
        """Of all fronts."""
        names = dict.fromkeys(name for life in self._lives for name in life)
        return {name: round(sum(life.get(name, 0) for life in self._lives)) for name in names}


@contextmanager
def served(engines: int) -> Iterator[Cluster]:
    """Engines and a front over a database and a cache of their own."""
    with postgres_cluster() as database, redis_server() as cache:
        environment = {
            "CELLAR_CONVERSATION_STORE": database.url,
            "CELLAR_KV_REMOTE": cache.url,
            "CELLAR_KV_REMOTE_KEY": base64.b64encode(os.urandom(32)).decode(),
        }
        with cluster(**environment) as made:
            made.deploy(ARGS, {"num_replicas": engines}, FRONT)
            yield made


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """A request that is sent again, as every client of OpenAI's does it, if its connection was closed meanwhile."""
    for _ in range(2):
        with suppress(httpx.TransportError):
            return await http.post(path, json=body)
    return await http.post(path, json=body)


async def events(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of a streamed response."""
    async with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:  # never sent again
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def turn(http: httpx.AsyncClient, talk: Talk, tokens: int) -> None:
    """The next turn of a conversation."""
    number = len(talk.answers)
    asked = f"Traveller {talk.number}, tell me more of day {number} in the old house."
    body: dict[str, Any] = {
        "model": "demo",
        "conversation": talk.id,
        "input": asked,
        "max_output_tokens": tokens,
        "ignore_eos": True,
    }
    body |= {"temperature": 0} if talk.number % 2 else {"temperature": 1.0, "seed": 1000 * talk.number + number}
    began, parts, whole, order, usage = time.monotonic(), list[str](), None, -1, dict[str, Any]()
    async for event in events(http, body):
        assert event["sequence_number"] > order
        order = event["sequence_number"]
        if event["type"] == "response.output_text.delta":
            parts.append(event["delta"])
        elif event["type"] in ("response.completed", "response.incomplete"):
            whole, usage = event["response"]["output"][0]["content"][0]["text"], event["response"]["usage"]
        assert event["type"] not in ("error", "response.failed"), event
    assert whole is not None, "the stream has ended before its end"
    assert "".join(parts) == whole
    talk.asked.append(asked)
    talk.answers.append(whole)
    talk.prompts.append(usage["input_tokens"])
    talk.found.append(usage["input_tokens_details"]["cached_tokens"])
    talk.seconds.append(time.monotonic() - began)


async def hold(http: httpx.AsyncClient, count: int, turns: int, tokens: int) -> list[Talk]:
    """So many conversations at once, to their ends."""

    async def one(number: int) -> Talk:
        talk = Talk(number)
        made = await post(http, "/v1/conversations", {})
        talk.id = made.json()["id"]
        for _ in range(turns):
            await turn(http, talk, tokens)
        return talk

    return list(await asyncio.gather(*map(one, range(count))))


async def chunks(http: httpx.AsyncClient) -> int:
    """Of all engines that the front has."""
    status = (await http.get("/engine/status")).json()
    return 0 if status["engine"] is None else int(status["engine"]["memory"][0]["chunks"])


async def count(http: httpx.AsyncClient, counts: Counts) -> None:
    """Look at the front's counts again and again."""
    while True:
        with suppress(httpx.TransportError):  # a front is being replaced
            answer = await http.get("/metrics")
            if answer.status_code == 200:
                counts.saw(answer.text)
        await asyncio.sleep(0.5)


def share_found(talks: Sequence[Talk]) -> float:
    """Of the tokens of all turns' prompts, the percentage that an engine had."""
    return round(100 * sum(sum(talk.found) for talk in talks) / sum(sum(talk.prompts) for talk in talks), 1)


async def disturb(
    made: Cluster,
    http: httpx.AsyncClient,
    kills: int,
    upgrade: dict[str, Any] | None,
    log: Callable[[str], None],
) -> int:
    """Kill engines, each once all are there, then replace all of them; -> kills."""
    engines, whole = len(made.engines()), await chunks(http)

    async def healthy() -> None:
        while len(made.engines()) != engines or await chunks(http) != whole:
            await asyncio.sleep(0.1)

    for k in range(kills):
        await healthy()
        await asyncio.sleep(0.3)
        victim = sorted(made.engines())[k % engines]
        os.kill(victim, signal.SIGKILL)
        log(f"killed {k + 1} of {kills}")
        await eventually(lambda gone=victim: gone not in made.engines())
    if upgrade is not None:
        await healthy()
        before = set(made.engines())
        log("upgrade begins")
        await asyncio.to_thread(made.deploy, {**ARGS, **upgrade}, {"num_replicas": engines}, FRONT)
        await eventually(lambda: not before & set(made.engines()))
        log("upgrade done")
    return kills


async def storm(
    made: Cluster,
    talks: int,
    turns: int,
    tokens: int,
    kills: int,
    upgrade: dict[str, Any] | None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """-> figures. Raises AssertionError if a stream breaks, a text is another, or something was not kept."""
    # A connection for each request: httpx closes idle ones whose time is over, and sometimes one that it has just given
    # to a request, when its loop is late.
    limits, counts = httpx.Limits(max_connections=None, max_keepalive_connections=0), Counts()
    async with httpx.AsyncClient(base_url=made.url, timeout=900, limits=limits) as http:
        counting = asyncio.create_task(count(http, counts))
        calm = await hold(http, talks, turns, tokens)
        log("undisturbed run done")
        stopped, held, rounds = asyncio.Event(), list[Talk](), 0

        async def keep_on() -> None:
            nonlocal rounds
            while not stopped.is_set() or not rounds:
                held.extend(await hold(http, talks, turns, tokens))
                rounds += 1
                log(f"round {rounds} done")

        load = asyncio.create_task(keep_on())
        trouble = asyncio.create_task(disturb(made, http, kills, upgrade, log))
        await asyncio.wait([load, trouble], return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            await load  # it has failed
        await trouble
        stopped.set()
        await load
        same = 0
        for talk in held:
            assert talk.answers == calm[talk.number].answers, talk
            same += len(talk.answers)
        kept = 0
        for talk in [*calm, *held]:
            items = (await http.get(f"/v1/conversations/{talk.id}/items", params={"limit": 100, "order": "asc"})).json()
            assert [(item["role"], item["content"][0]["text"]) for item in items["data"]] == talk.said()
            kept += len(talk.answers)
        counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting
    waits = sorted(seconds for talk in held for seconds in talk.seconds)
    return {
        "engines": len(made.engines()),
        "talks": talks,
        "turns": turns,
        "rounds": rounds,
        "kills": kills,
        "upgrade": upgrade is not None,
        "streams": len(waits),
        "streams_equal": same,
        "turns_kept": kept,
        "prompts_found_percent": share_found(held),
        "calm_prompts_found_percent": share_found(calm),
        "choices": counts.total(),
        "p50_seconds": round(waits[len(waits) // 2], 2),
        "p99_seconds": round(waits[int(len(waits) * 0.99)], 2),
        "calm_p50_seconds": round(sorted(s for talk in calm for s in talk.seconds)[talks * turns // 2], 2),
    }


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("engines", 3), ("talks", 300), ("turns", 3), ("tokens", 48), ("kills", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    began = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    with served(options.engines) as made:
        log(f"{options.engines} engines are there")
        upgrade = {"max_num_seqs": 200}
        figures = asyncio.run(storm(made, options.talks, options.turns, options.tokens, options.kills, upgrade, log))
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
