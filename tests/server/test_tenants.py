"""Several keys on one server: nothing of one shows in what another can ask for."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner

from cellar.cli.main import build
from cellar.core.errors import ConfigError
from cellar.server.config import ServerConfig
from cellar.server.guard import ApiKeys
from cellar.server.keys import VARIABLE, digest_of, owner_of, with_keys
from tests.fake_front import ENDLESS, ROOMY
from tests.limits import SECONDS, run_python
from tests.server.served import Served, serve

ALICE, BOB = {"authorization": "Bearer alice-key"}, {"x-api-key": "bob-key"}
SECRET = [7, *range(20, 220)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"api_key": ("alice-key", "bob-key")}) as served:
        yield served


def cached(served: Served, headers: dict[str, str], prompt: list[int], **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_guess_at_anothers_prompt_finds_nothing(served: Served) -> None:
    assert cached(served, ALICE, SECRET) == 0
    assert cached(served, ALICE, SECRET) == 192
    assert cached(served, BOB, SECRET) == 0
    for guess in ("alice-key", digest_of(b"alice-key"), digest_of(b"alice-key") + "/"):
        assert cached(served, BOB, SECRET, cache_salt=guess) == 0
    assert cached(served, ALICE, SECRET, prompt_cache_key="talk", cache_salt="mine") == 0
    assert cached(served, BOB, SECRET, prompt_cache_key="talk", cache_salt="mine") == 0
    assert cached(served, ALICE, SECRET, cache_salt="mine") == 192


def test_prefixes_are_shared_where_that_is_asked_for() -> None:
    with serve({"api_key": "alice-key,bob-key", "share_prefixes": True}) as served:
        assert cached(served, ALICE, SECRET) == 0
        assert cached(served, BOB, SECRET) == 192
        assert cached(served, BOB, SECRET, cache_salt="mine") == 0
        assert cached(served, ALICE, SECRET, cache_salt="mine") == 192


def test_conversations_and_ids_of_two_owners_do_not_meet() -> None:
    heard: list[Any] = []
    with serve({"api_key": "alice-key,bob-key", "share_prefixes": True}) as served:
        store = served.opened.front.engine.scheduler._store  # type: ignore[attr-defined]
        reserve = store.reserve

        def seen(*args: Any, **kwargs: Any) -> Any:
            heard.append(kwargs["name"])
            return reserve(*args, **kwargs)

        store.reserve = seen
        for headers in (ALICE, BOB):
            cached(served, headers, [1, 2], prompt_cache_key="talk", request_id="same")
            cached(served, headers | {"X-Session-ID": "talk"}, [1, 2])
    assert len(heard) == 4
    assert len(set(heard)) == 2


def test_an_id_that_another_uses_is_free() -> None:
    with serve({"api_key": "alice-key,bob-key"}, latency=0.02, **ROOMY) as served, served.http() as http:
        body = {"prompt": [1, 2], "max_tokens": ENDLESS, "ignore_eos": True, "request_id": "same", "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=ALICE) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            assert cached(served, BOB, [1, 2], request_id="same") == 0
            taken = http.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False}, headers=ALICE)
            assert taken.status_code == 400
            assert "in use" in taken.text


async def owner_at(app_keys: list[str], path: str, *headers: tuple[bytes, bytes]) -> tuple[str, int]:
    """What the guard says of a request, and what it answers."""
    seen: list[str] = []
    statuses: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(owner_of(scope))
        statuses.append(200)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    await ApiKeys(app, app_keys)(scope, receive, send)
    return (seen or [""])[0], statuses[0]


@pytest.mark.parametrize(
    ("path", "headers", "key"),
    [
        ("/v1/models", [(b"authorization", b"Bearer one")], "one"),
        ("/v1/models", [(b"authorization", b"bearer  two ")], "two"),
        ("/v1/models", [(b"x-api-key", b"two")], "two"),
        ("/v1/models", [(b"authorization", b"Bearer one"), (b"x-api-key", b"two")], "one"),
        ("/v1/models", [(b"authorization", b"Bearer none"), (b"x-api-key", b"two")], "two"),
        ("/v1/models", [(b"authorization", b"Basic one")], None),
        ("/v1/models", [(b"authorization", b"Bearer none"), (b"authorization", b"Bearer one")], None),
        ("/v1/models", [(b"x-api-key", b"")], None),
        ("/health", [(b"x-api-key", b"two")], "two"),
        ("/health", [], ""),
    ],
)
def test_whose_a_request_is(path: str, headers: list[tuple[bytes, bytes]], key: str | None) -> None:
    owner, status = asyncio.run(owner_at(["one", "two"], path, *headers))
    assert status == (401 if key is None else 200)
    assert owner == (digest_of(key.encode()) if key else "")


def test_keys_of_all_sources_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "c, d,")
    (tmp_path / "keys").write_text("b\n# none\na\n")
    found = with_keys(ServerConfig(api_key=["a", "e,f"], api_key_file=str(tmp_path / "keys")))
    assert found.api_key == ("a", "e", "f", "b", "c", "d")
    assert "api_key" not in repr(found).replace("api_key_file", "")
    assert pickle.loads(pickle.dumps(found)) == found
    assert with_keys(ServerConfig()).api_key == ("c", "d")
    with pytest.raises(ConfigError, match="no key"):
        with_keys(ServerConfig(api_key=[","]))
    monkeypatch.delenv(VARIABLE)
    assert with_keys(ServerConfig()).api_key is None


def test_the_option_may_be_given_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[ServerConfig] = []
    monkeypatch.setattr("cellar.server.run.serve", lambda engine, server, limits, say, start: taken.append(server))
    done = CliRunner().invoke(build(), ["serve", "--api-key", "a", "--api-key", "b"])
    assert done.exit_code == 0, done.output
    assert taken[0].api_key == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process change it")
def test_a_key_leaves_the_list_of_processes() -> None:
    code = (
        "from cellar.server.keys import with_keys; from cellar.server.config import ServerConfig; import sys\n"
        "with_keys(ServerConfig(api_key=sys.argv[2].partition('=')[2]))\n"
        "print(open('/proc/self/cmdline').read().replace('\\0', ' '))"
    )
    said = run_python(code, "serve", "--api-key=first-secret,second-secret", "--port")
    assert "secret" not in said
    assert "--api-key=************,************* --port" in said
