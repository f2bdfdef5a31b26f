"""What a client deletes leaves no KV in host memory, on a disk or in Redis when the reply comes; the rest stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from cellar import AsyncLLM, demo
from cellar.core.config import EngineConfig
from cellar.core.messages import Tier
from cellar.engine.opened import Opened, open_front
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import SameProcess, ServedModel
from tests.fake_front import engine_of
from tests.limits import SECONDS, asked, until
from tests.redis_server import redis_server
from tests.server.served import running

pytestmark = pytest.mark.long  # they need Debian's redis-server, see scripts/setup-system

STORIES = [
    " ".join(f"{name} went to the {place} and saw a red bird." for place in ("park", "sea", "hill", "wood", "town") * 3)
    for name in ("Tom", "Lily", "Ben", "Anna")
]


@contextmanager
def served(data: Path, **tiers: Any) -> Iterator[tuple[openai.OpenAI, Opened]]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 16}
    config = EngineConfig.of(model=str(demo.path()), kv_cache_memory_bytes=2**26, **options, **tiers)
    opened = open_front(config, recovery="load")
    app = build_app(
        SameProcess(AsyncLLM.over(opened)),
        ServedModel.of(opened, ("m",)),
        ServerConfig(data_dir=str(data)),
        LimitConfig(),
    )
    with running(app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS), opened


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Response:
    made = client.responses.create(model="m", input=text, max_output_tokens=8, temperature=0, **fields)
    assert isinstance(made, Response)
    return made


def cached(made: Response) -> int:
    assert made.usage is not None
    return made.usage.input_tokens_details.cached_tokens


def held(opened: Opened, tier: Tier) -> int:
    """Chunks that a tier has."""
    engine = engine_of(opened)
    stats = next(one for one in asked(engine, engine.stats).tiers if one.tier is tier)
    return stats.cached + stats.referenced


def deleted_and_kept(client: openai.OpenAI, opened: Opened, tier: Tier) -> int:
    """Two conversations and two chains, of which one each is deleted when the tier has all; -> chunks left."""
    kept, gone = client.conversations.create().id, client.conversations.create().id
    ask(client, STORIES[0], conversation=kept)
    ask(client, STORIES[2])
    until(lambda: held(opened, tier) >= 2 * 150 // 16)
    ask(client, STORIES[1], conversation=gone)
    chain = ask(client, STORIES[3])
    until(lambda: held(opened, tier) >= 4 * 150 // 16)
    client.conversations.delete(gone)
    client.responses.delete(chain.id)
    return held(opened, tier)


def checked(client: openai.OpenAI) -> None:
    """By an engine that has never seen them: who asks leaves KV again."""
    for story, there in zip(STORIES, (True, False, True, False), strict=True):
        found = cached(ask(client, story, store=False))
        assert found >= 100 if there else found <= 32, (story[:5], found)


def test_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", "0123456789abcdef" * 2)
    with redis_server() as server:
        tiers = {"kv_remote": server.url, "kv_remote_size": 0.5}
        with served(tmp_path / "one", **tiers) as (client, opened):
            left = deleted_and_kept(client, opened, Tier.REMOTE)
            assert len(server.chunks()) == left, "the entries themselves are gone when the reply comes"
        with served(tmp_path / "two", **tiers) as (client, _):
            checked(client)


def test_on_a_disk_below_the_host(tmp_path: Path) -> None:
    tiers = {"kv_offloading_size": 0.25, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_size": 0.25}
    with served(tmp_path / "one", **tiers) as (client, opened):
        deleted_and_kept(client, opened, Tier.DISK)
    with served(tmp_path / "two", **tiers) as (client, _):
        checked(client)
