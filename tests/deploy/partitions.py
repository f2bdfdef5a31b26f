"""What users see when hosts are cut off: Ray, PostgreSQL and Redis on five hosts, which are network namespaces.

    python -m tests.deploy.partitions [--seconds 30] [--streams 8] [--only Redis]        as root

A front on the first host, an engine each on the second and third, Redis on the fourth, PostgreSQL on the fifth. The
second is cut off, then has a narrow cable; then Redis and PostgreSQL are cut off. Clients stream all the time; each
text must be that of an undisturbed run. A line of JSON for each part; needs a bridge, veth and `tc tbf` of the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cellar.deploy.roster import NEWS_SECONDS
from tests.conversations.postgres import cluster as postgres_cluster
from tests.deploy.cluster import ENVIRONMENT, MEMORY, Cluster
from tests.deploy.hosts import Host, Switch, in_a_network_of_its_own
from tests.deploy.storm import ARGS
from tests.limits import SECONDS
from tests.network import Way
from tests.redis_server import redis_server

PORT = 6380
ENGINE = "ray::ServeReplica:cellar:Engine"
TOKENS = 160


@dataclass
class Seen:
    """What clients saw in a part (seconds)."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the longest of each stream
    streams: int = 0
    equal: int = 0
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For the log."""
        return {
            "streams": self.streams,
            "equal": self.equal,
            "errors": self.errors[:3],
            "first_token_p50": _share(self.first, 0.5),
            "first_token_max": _share(self.first, 1.0),
            "longest_gap_p50": _share(self.gaps, 0.5),
            "longest_gap_max": _share(self.gaps, 1.0),
        }


def _share(values: list[float], share: float) -> float | None:
    return round(sorted(values)[round((len(values) - 1) * share)], 2) if values else None


class Hosts:
    """All five, with Cellar on them."""

    def __init__(self, stack: ExitStack) -> None:
        switch = Switch()
        stack.callback(switch.close)
        self.front, self.engine, self.other, self.cache, self.database = (switch.host() for _ in range(5))
        cache, database = stack.enter_context(redis_server()), stack.enter_context(postgres_cluster())
        for host, port, path in (
            (self.cache, 6379, cache.socket),
            (self.database, 5432, database.directory / ".s.PGSQL.5432"),
        ):
            stack.callback(Way(path, host.listener(port)).close)
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cellar-ray-", ignore_cleanup_errors=True))
        )
        self._environment = {
            **ENVIRONMENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),
            "CELLAR_CONVERSATION_STORE": f"postgresql://cellar@{self.database.address}/postgres",
            "CELLAR_KV_REMOTE": f"redis://{self.cache.address}:6379",
            "CELLAR_KV_REMOTE_KEY": base64.b64encode(os.urandom(32)).decode(),
        }
        stack.callback(self._stop)
        self._ray(
            self.front,
            '{"front": 1}',
            "--head",
            f"--port={PORT}",
            f"--temp-dir={directory}",
            "--include-dashboard=false",
        )
        for host in (self.engine, self.other):
            self.join(host)
        self.ray = Cluster(
            directory, self._environment, self.front.address, self.front.within, f"{self.front.address}:{PORT}"
        )
        stack.callback(self.ray.close)
        self.ray.deploy(
            {**ARGS, "allowed_hosts": "*"},
            {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1, "resources": {"engine": 1}}},
            {"ray_actor_options": {"num_cpus": 1, "resources": {"front": 1}}},
        )

    def join(self, host: Host) -> None:
        """Have it take part, with an engine."""
        self._ray(host, '{"engine": 1}', f"--address={self.front.address}:{PORT}")

    def _ray(self, host: Host, resources: str, *options: str) -> None:
        command = ["ray", "start", f"--node-ip-address={host.address}", "--num-cpus=4", f"--resources={resources}"]
        command += [f"--object-store-memory={MEMORY}", "--disable-usage-stats", *options]
        program = str(Path(sys.executable).with_name("ray"))
        subprocess.run(
            [*host.within, program, *command[1:]],
            check=True,
            env={**os.environ, **self._environment},
            stdout=sys.stderr,
        )

    def _stop(self) -> None:
        """Ours alone: who runs on one of the hosts."""
        for host in (self.front, self.engine, self.other):
            for process in host.processes():
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)


async def stream(http: httpx.AsyncClient, number: int, seen: Seen, calm: dict[int, str]) -> None:
    """One completion, compared with the one of its number that was not disturbed."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": f"Traveller {number} of the old house by the river said:",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    last, longest, text, first = time.monotonic(), 0.0, "", None
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {(await answer.aread()).decode()[:200]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if first is None:
                    first = now - last
                else:
                    longest = max(longest, now - last)
                last = now
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    except (httpx.TransportError, AssertionError) as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
        return
    seen.streams += 1
    seen.first.append(first or 0.0)
    seen.gaps.append(longest)
    seen.equal += calm.setdefault(number, text) == text


async def keep_on(http: httpx.AsyncClient, count: int, seen: Seen, calm: dict[int, str], stop: asyncio.Event) -> None:
    """So many streams at once, one after the other."""

    async def one(number: int) -> None:
        while True:
            await stream(http, number, seen, calm)
            if stop.is_set():
                return

    await asyncio.gather(*map(one, range(count)))


async def turns(http: httpx.AsyncClient, said: list[tuple[float, float, int]], stop: asyncio.Event) -> None:
    """Stored responses, one after the other: when, how long, and which status."""
    while not stop.is_set():
        began = time.monotonic()
        answer = await http.post("/v1/responses", json={"model": "demo", "input": "Hello", "max_output_tokens": 4})
        said.append((began, time.monotonic() - began, answer.status_code))
        await asyncio.sleep(0.2)


async def chunks(http: httpx.AsyncClient) -> int:
    """Of the engines that the front has."""
    answer = await http.get("/engine/status")
    if answer.status_code != 200:
        return 0
    status = answer.json()
    return 0 if status["engine"] is None else int(status["engine"]["memory"][0]["chunks"])


async def part(
    http: httpx.AsyncClient, count: int, calm: dict[int, str], trouble: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Streams and stored responses under some trouble."""
    seen, stop, said = Seen(), asyncio.Event(), list[tuple[float, float, int]]()
    load = asyncio.gather(keep_on(http, count, seen, calm, stop), turns(http, said, stop))
    try:
        more = await trouble()
    finally:
        stop.set()
        await load
    refused = [wait for _, wait, status in said if status != 200]
    return {
        **seen.figures(),
        **more,
        "responses": len(said),
        "responses_refused": sorted({status for _, _, status in said if status != 200}),
        "refused_after_max": _share(refused, 1.0),
        "answered_after_max": _share([wait for _, wait, status in said if status == 200], 1.0),
    }


async def show(hosts: Hosts, seconds: float, count: int, only: str) -> None:
    """The parts whose names hold `only`."""
    calm: dict[int, str] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=hosts.ray.url, timeout=600, limits=limits) as http:
        end = time.monotonic() + SECONDS
        while (answer := await http.get("/health")).status_code != 200:  # HAProxy hears of the front a little later
            assert time.monotonic() < end, f"{answer.status_code}: {answer.text[:500]}"
            await asyncio.sleep(0.5)
        whole, end = 0, time.monotonic() + 2 * NEWS_SECONDS
        while time.monotonic() < end:  # so long a front may not have heard of its second engine
            whole = max(whole, await chunks(http))
            await asyncio.sleep(0.5)

        async def nothing() -> dict[str, Any]:
            await asyncio.sleep(seconds / 2)
            return {}

        async def cut(host: Host) -> dict[str, Any]:
            await asyncio.sleep(3)
            before = host.processes(ENGINE)
            host.pull()
            await asyncio.sleep(seconds)
            host.plug()
            began, lost = time.monotonic(), False
            while await chunks(http) != whole and time.monotonic() < began + 2 * SECONDS:
                await asyncio.sleep(0.1)
                if not lost and time.monotonic() > began + SECONDS / 4 and not host.processes(ENGINE):
                    lost = True  # Ray has given it up, and ended what ran there
                    await asyncio.to_thread(hosts.join, host)
            return {
                "started_again": lost,
                "whole_again_after": round(time.monotonic() - began, 1),
                "whole": await chunks(http) == whole,
                "same_engine": host.processes(ENGINE) == before,
            }

        async def narrow() -> dict[str, Any]:
            hosts.engine.narrow("256kbit")
            await asyncio.sleep(seconds)
            hosts.engine.narrow(None)
            return {}

        async def lost(host: Host) -> dict[str, Any]:
            host.pull()
            await asyncio.sleep(seconds)
            host.plug()
            began = time.monotonic()
            answer = None
            while answer != 200 and time.monotonic() < began + 300:
                body = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
                answer = (await http.post("/v1/responses", json=body)).status_code
            return {"stored_again_after": round(time.monotonic() - began, 1)}

        for name, trouble in (
            ("undisturbed", nothing),
            ("an engine's host is cut off", lambda: cut(hosts.engine)),
            ("an engine's host has 256 kbit/s", narrow),
            ("Redis is cut off", lambda: lost(hosts.cache)),
            ("PostgreSQL is cut off", lambda: lost(hosts.database)),
        ):
            if only not in name:
                continue
            print(json.dumps({"part": name, **await part(http, count, calm, trouble)}), flush=True)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--only", default="", help="parts whose names hold this")
    options = parser.parse_args()
    in_a_network_of_its_own("tests.deploy.partitions", sys.argv[1:])
    with ExitStack() as stack:
        asyncio.run(show(Hosts(stack), options.seconds, options.streams, options.only))


if __name__ == "__main__":
    main()
