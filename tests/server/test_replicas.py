"""`--replicas`: several engines of one server. Each may be killed: its streams go on elsewhere, and it comes back."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellar.core.errors import CellarError, ConfigError
from cellar.routing.router import Why
from cellar.server.config import ServerConfig
from cellar.server.keepers import EngineKeepers
from tests.fake_front import ROOMY
from tests.limits import SECONDS, join_all, until
from tests.server.fake_process import children_of, open_engine, open_nothing
from tests.server.served import demo_process
from tests.server.test_fronts import Streams, fronts, metrics

RUNNING = "num_requests_running"


def of_engine(found: dict[str, float], stem: str, model: str = "fake", prefix: str = "cellar") -> list[float]:
    """An engine's figure, of each."""
    names = (f'{prefix}:{stem}{{engine="{k}",model_name="{model}"}}' for k in range(100))
    return [found[name] for name in names if name in found]


def complete(url: str, prompt: Any, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    sent = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    answer = httpx.post(f"{url}/v1/completions", json=sent, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def engines_of(pid: int, count: int) -> Sequence[Path]:
    return children_of(pid)[:count]


def kill(process: Path) -> None:
    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Any, str]]:
    """Two engines behind one front. The first test reads counts from zero, the second kills both engines."""
    with fronts(1, replicas=2, latency=0.02, **ROOMY) as served:
        yield served


@pytest.mark.long
def test_a_conversation_stays_where_its_memory_is_and_figures_tell_engines_apart(two: tuple[Any, str]) -> None:
    _, url = two
    prompt = list(range(3, 80))
    for turn in range(3):
        for k in range(4):
            asked = complete(url, [k, *prompt], {"x-session-id": f"c{k}"}, model="fake")
            cached = asked["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
            assert cached == (64 if turn else 0)
    until(lambda: of_engine(metrics(url), RUNNING) == [0, 0])
    found = metrics(url)
    made = of_engine(found, "generation_tokens_total")
    assert sum(made) == 96
    assert min(made) > 0
    assert of_engine(found, "generation_tokens_total", prefix="vllm") == made
    assert 'cellar:generation_tokens_total{model_name="fake"}' not in found
    assert found['vllm:e2e_request_latency_seconds_count{engine="all",model_name="fake"}'] == 12
    chosen = {why: found[f'cellar:router_choices_total{{model_name="fake",reason="{why}"}}'] for why in Why}
    assert sum(chosen.values()) == found['cellar:router_choice_seconds_count{model_name="fake"}'] == 12
    assert chosen["new"] == 4
    assert found['cellar:requests_migrated_total{model_name="fake"}'] == 0
    assert httpx.get(f"{url}/engine/status", timeout=SECONDS).json()["engine"]["generation_tokens"] == 96


@pytest.mark.long
def test_streams_outlive_each_engine(two: tuple[Any, str]) -> None:
    """Both engines have some of them; one after the other is killed, and is back before the next one is."""
    process, url = two
    engines = engines_of(process.pid, 2)
    streams = Streams(url, [[k + 3, 5, k] for k in range(12)], 400)
    until(lambda: min(of_engine(metrics(url), RUNNING)) > 0)  # both are used
    kill(engines[0])
    until(lambda: of_engine(metrics(url), "engine_up").count(0) == 1 or restarts(url) == 1)
    assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
    until(lambda: of_engine(metrics(url), "engine_up") == [1, 1])
    kill(engines[1])
    streams.join()
    for prompt in streams.texts:
        assert prompt in streams.ended
        streams.check(prompt)
    until(lambda: of_engine(metrics(url), "engine_up") == [1, 1] and restarts(url) == 2)
    assert metrics(url)['cellar:requests_migrated_total{model_name="fake"}'] > 0


def restarts(url: str) -> float:
    return metrics(url)['cellar:engine_restarts_total{model_name="fake"}']


@pytest.mark.long
def test_all_start_or_none(tmp_path: Path) -> None:
    with pytest.raises(CellarError, match="no room"):
        EngineKeepers([open_engine, open_nothing], [str(tmp_path / name) for name in "ab"])
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_stories_outlive_a_killed_replica() -> None:
    """`cellar serve` as users run it: conversations find their KV, and stories are told as if nobody was killed."""
    options = ("--replicas", "2", "--kv-cache-memory-bytes", str(128 << 20))
    with demo_process(*options, "--dtype", "float32") as (pid, url):
        engines = engines_of(pid, 2)
        prompts = [f"Once upon a time there were {k} friends" for k in range(8)]
        for turn in range(3):
            for k in range(4):
                sent = f"There were {k} cats and {k} dogs. " * 10
                usage = complete(url, sent, {"x-session-id": f"c{k}"}, model="cellar-demo")["usage"]
                assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == (turn > 0)
        wanted = [told(url, prompt) for prompt in prompts]
        stories: dict[str, str] = {}
        begun = threading.Semaphore(0)

        def tell(prompt: str) -> None:
            stories[prompt] = told(url, prompt, begun.release)

        threads = [threading.Thread(target=tell, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for _ in prompts:
            assert begun.acquire(timeout=SECONDS)
        kill(engines[0])
        join_all(threads)
        assert [stories[prompt] for prompt in prompts] == wanted
        until(lambda: of_engine(metrics(url), "engine_up", "cellar-demo") == [1, 1])
        assert metrics(url)['cellar:requests_migrated_total{model_name="cellar-demo"}'] > 0


def told(url: str, prompt: str, begun: Callable[[], object] = lambda: None) -> str:
    """A story, streamed; `begun` is called with its first piece."""
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "model": "cellar-demo"}, timeout=SECONDS) as lines:
        for line in lines.iter_lines():
            if line.startswith('data: {"id'):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun()
                begun = lambda: None  # noqa: E731
    return text


def test_options() -> None:
    with pytest.raises(ConfigError, match="replicas is 0"):
        ServerConfig(replicas=0)
    with pytest.raises(ConfigError, match="replicas is 2, but without processes"):
        ServerConfig(replicas=2, disable_frontend_multiprocessing=True)
