"""Limits, keys, deadlines, clients that hang up: what an operator relies on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from cellar.core.errors import ConfigError
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.keys import check_quota, read_keys
from tests.fake_front import ENDLESS, ROOMY
from tests.limits import SECONDS, join_all, until
from tests.server.served import Served, raw, serve

LONG: dict[str, Any] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
MESSAGE: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LONGER = {**LONG, "max_tokens": ENDLESS}


def test_too_many_that_wait_get_a_503_with_retry_after() -> None:
    with serve(limits={"max_queued_requests": 3}, num_rows=1, latency=0.02, **ROOMY) as served:
        admission = served.app.state.api.desk.admission
        first = raw(served.url, LONGER)
        until(lambda: served.opened.front.engine.stats().running == 1 and admission.num_requests == 0)
        others = [raw(served.url, LONG) for _ in range(3)]
        until(lambda: admission.num_requests == served.opened.front.engine.stats().waiting == 3)
        with served.http() as http:
            answer = http.post("/v1/completions", json=LONG)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "service_unavailable_error"
            assert http.get("/health").status_code == 200
            text = http.get("/metrics").text
            assert 'cellar:num_requests_waiting{model_name="fake"} 3.0' in text
        for sock in (first, *others):
            sock.close()
        served.settle()


def test_prompt_tokens_that_wait_are_limited_too() -> None:
    with serve(limits={"max_queued_tokens": 100}, num_rows=1, latency=0.02, **ROOMY) as served:
        admission = served.app.state.api.desk.admission
        first = raw(served.url, LONGER)
        until(lambda: served.opened.front.engine.stats().running == 1 and admission.num_requests == 0)
        second = raw(served.url, {**LONG, "prompt": [1] * 200, "max_tokens": 2})
        until(lambda: admission.num_requests == 1)  # alone it is let in, however long
        with served.http() as http:
            assert http.post("/v1/completions", json=LONG).status_code == 503
        first.close()
        second.close()
        served.settle()


def test_one_key_has_a_quota_and_others_do_not_notice() -> None:
    limits = {"max_key_queued_requests": 2, "max_key_queued_tokens": 100}
    greedy, other = {"authorization": "Bearer greedy"}, {"x-api-key": "other"}
    with serve({"api_key": "greedy,other"}, limits, num_rows=1, latency=0.02, **ROOMY) as served:
        admission = served.app.state.api.desk.admission
        engine = served.opened.front.engine
        first = raw(served.url, LONGER, headers=greedy)
        until(lambda: engine.stats().running == 1 and admission.num_requests == 0)
        waiting = [raw(served.url, LONG, headers=greedy) for _ in range(2)]
        until(lambda: admission.num_requests == 2)
        with served.http() as http:
            for path, more in (("/v1/completions", LONG), ("/v1/messages", MESSAGE)):
                answer = http.post(path, json=more, headers=greedy)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert "2 sequences of this API key" in answer.json()["error"]["message"]
            with pytest.raises(openai.RateLimitError) as refused:
                served.client().with_options(api_key="greedy").completions.create(model="fake", prompt="hi")
            assert refused.value.code == "rate_limit_exceeded"
            others = raw(served.url, {**LONG, "prompt": [1] * 99}, headers=other)
            until(lambda: admission.num_requests == 3)
            answer = http.post("/v1/completions", json=LONG, headers=other)
            assert answer.status_code == 429
            assert "99 prompt tokens" in answer.json()["error"]["message"]
        for sock in (first, *waiting, others):
            sock.close()
        served.settle()
        assert admission._waiting.of("") == (0, 0)


def test_keys_take_turns_however_many_requests_each_sends() -> None:
    with serve({"api_key": "many,one"}, num_rows=2, latency=0.005, **ROOMY) as served:
        stats = served.opened.front.engine.stats
        socks = [raw(served.url, LONGER, headers={"x-api-key": "many"}) for _ in range(8)]
        until(lambda: stats().running == 2 and stats().waiting == 6)
        with served.http() as http:
            answer = http.post("/v1/completions", json={**LONG, "max_tokens": 8}, headers={"x-api-key": "one"})
        assert answer.status_code == 200
        assert stats().waiting >= 6, "it waited until others had ended"
        for sock in socks:
            sock.close()
        served.settle()


def test_a_quota_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_key_queued_tokens counts for each API key, and there is none"):
        check_quota(ServerConfig(), LimitConfig(max_key_queued_tokens=5))
    check_quota(ServerConfig(api_key="k"), LimitConfig(max_key_queued_tokens=5))
    with pytest.raises(ConfigError, match="max_key_queued_requests is 0"):
        LimitConfig(max_key_queued_requests=0)


def test_the_longest_prompt() -> None:
    with serve(limits={"max_prompt_len": 10}) as served, served.http() as http:
        assert http.post("/v1/completions", json={**LONG, "prompt": [1] * 10, "max_tokens": 1}).status_code == 200
        answer = http.post("/v1/completions", json={**LONG, "prompt": [1] * 11})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_deadline() -> None:
    with serve(limits={"request_timeout": 0.2}, latency=0.02, **ROOMY) as served, served.http() as http:
        started = time.monotonic()
        answer = http.post("/v1/completions", json=LONGER)
        assert time.monotonic() - started < SECONDS / 2  # of 160 s
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        served.settle()


def test_a_deadline_in_the_middle_of_a_stream() -> None:
    for seconds in (0.2, 1.0, 5.0, 25.0):  # on a busy machine the first token may come later than the first of them
        with serve(limits={"request_timeout": seconds}, latency=0.02, **ROOMY) as served, served.http() as http:
            started = time.monotonic()
            answer = http.post("/v1/completions", json={**LONGER, "stream": True})
            assert time.monotonic() - started < SECONDS / 2 + seconds
            options: Any = {"stream": True, "extra_body": {"ignore_eos": True}}
            with pytest.raises(openai.APIError):
                list(served.client().completions.create(model="fake", prompt=[1], max_tokens=ENDLESS, **options))
            served.settle()
        if answer.status_code == 200:
            break
    *_, last, done = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"


def test_large_bodies() -> None:
    with serve(limits={"max_body_bytes": 10_000}) as served:
        with served.http() as http:
            answer = http.post("/v1/completions", json={**LONG, "prompt": [1] * 9000})
            assert answer.status_code == 413
            assert answer.json()["error"]["type"] == "invalid_request_error"

            def pieces() -> Any:
                for _ in range(100):
                    yield b" " * 1000

            chunked = http.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
            assert chunked.status_code == 413
        # a client that announces 100 MB gets its answer before it has sent them
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n" + b" " * 1000
            )
            assert sock.recv(100).startswith(b"HTTP/1.1 413")
        # and one that reads only when it has sent all gets it, too: the connection is not reset meanwhile
        for size in (20_000, 2_000_000):
            with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size)
                time.sleep(0.1)
                for _ in range(size // 1000):
                    sock.sendall(b" " * 1000)
                time.sleep(0.1)
                said = b"".join(iter(lambda sock=sock: sock.recv(1000), b""))
                assert said.startswith(b"HTTP/1.1 413")
                assert b"the body is larger" in said
        # who asks whether to send a body sends none
        with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000\r\n"
            sock.sendall(head + b"expect: 100-continue\r\n\r\n")
            said = b"".join(iter(lambda sock=sock: sock.recv(1000), b""))
            assert said.startswith(b"HTTP/1.1 413")


def test_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsecond\n")
    with serve({"api_key": "first", "api_key_file": str(file)}) as served:
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("firs", 401), ("", 401)):
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key or " ", max_retries=0)
            if status == 200:
                assert client.models.list().data
            else:
                with pytest.raises((openai.AuthenticationError, openai.APIConnectionError)):
                    client.models.list()
        with served.http() as http:
            for path, status in (("/health", 200), ("/metrics", 200), ("/version", 200), ("/health_generate", 401)):
                assert http.get(path).status_code == status
            answer = http.get("/v1/models", headers={"authorization": "Basic first"})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "invalid_api_key" in answer.text


def test_keys_that_are_no_keys(tmp_path: Path) -> None:
    assert read_keys(None, None) == ()
    assert read_keys(" a, b ", None) == ("a", "b")
    (tmp_path / "empty").write_text("# nothing\n")
    for option, file in ((None, "empty"), ("", None), (None, "missing")):
        with pytest.raises(ConfigError, match="key"):
            read_keys(option, file and str(tmp_path / file))


def test_cors_is_off_unless_asked_for() -> None:
    headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
    with serve() as served, served.http() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=headers).headers
        assert http.options("/v1/completions", headers=headers).status_code == 405
    with serve({"allowed_origins": "http://a.example", "api_key": "k"}) as served, served.http() as http:
        answer = http.options("/v1/completions", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        other = http.options("/v1/completions", headers={**headers, "origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_text_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serve({"enable_log_requests": True}) as served, served.http() as http:
        body = {"prompt": "a secret word", "stop": ["hush"], "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        choice = {"structured_outputs": {"choice": ["secret choice"]}}
        assert http.post("/v1/completions", json={**body, **choice}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": ["a secret word", 3]}).status_code == 400
        assert http.post("/v1/chat/completions", json={"messages": [{"role": "secret"}]}).status_code == 400
    logged = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("cellar", "uvicorn"))
    )
    assert "prompt tokens" in logged
    assert "secret" not in logged
    assert "hush" not in logged


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3, 4]]], ids=["one", "two"])
def test_a_client_that_hangs_up_is_dropped(stream: bool, prompt: Any) -> None:
    with serve(latency=0.02, **ROOMY) as served:
        sock = raw(served.url, {**LONGER, "prompt": prompt, "stream": stream, "n": 2})
        stats = served.opened.front.engine.stats
        until(lambda: stats().running == 2 * (1 if isinstance(prompt[0], int) else 2))
        if stream:
            assert sock.recv(10)
        sock.close()
        served.settle()
        assert stats().generation_tokens < ENDLESS
        with served.http() as http:
            assert 'finished_reason="abort"' in http.get("/metrics").text


def hang_ups(served: Served, count: int) -> None:
    """Clients that go at random moments: while sending, waiting, reading."""
    rng = random.Random(1)
    url = served.url.removeprefix("http://").split(":")

    async def one(k: int) -> None:
        body = json.dumps(
            {**LONG, "stream": bool(k % 2), "n": 1 + k % 3, "prompt": [k % 50 + 3] * (1 + k % 40)}
        ).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        data = head % len(body) + body
        reader, writer = await asyncio.open_connection(url[0], int(url[1]))
        writer.write(data[: rng.randrange(len(data))] if k % 10 == 0 else data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(), rng.random() * 0.2)
        if k % 4 == 0:
            writer.transport.abort()
        else:
            writer.close()

    async def run() -> None:
        gate = asyncio.Semaphore(40)

        async def gated(k: int) -> None:
            async with gate:
                await one(k)

        await asyncio.gather(*(gated(k) for k in range(count)))

    asyncio.run(run())


def test_clients_that_hang_up_at_random_moments() -> None:
    with serve(latency=0.002, num_slots=48) as served:
        hang_ups(served, 150)
        served.settle()
        with served.http() as http:
            assert http.get("/health_generate").status_code == 200


@pytest.mark.long
def test_a_thousand_clients_that_hang_up() -> None:
    with serve(latency=0.002, num_slots=48) as served:
        hang_ups(served, 1000)
        served.settle()


def test_a_failing_step_is_a_500_and_a_broken_loop_a_503() -> None:
    with serve(fail=lambda plan: "the device is warm" if plan.step == 3 else None) as served, served.http() as http:
        answer = http.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert "the device is warm" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        api = served.app.state.api
        api.host._llm.close()
        assert http.get("/health").status_code == 503
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**LONG, "stream": stream})
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        assert 'cellar:engine_up{model_name="fake"} 0.0' in http.get("/metrics").text


def test_streams_see_an_engine_that_dies() -> None:
    with serve(latency=0.01, **ROOMY) as served:
        found: list[str] = []

        def read() -> None:
            with (
                served.http() as http,
                http.stream("POST", "/v1/completions", json={**LONGER, "stream": True}) as answer,
            ):
                found.extend(line for line in answer.iter_lines() if line)

        thread = threading.Thread(target=read)
        thread.start()
        until(lambda: len(found) > 3)
        served.app.state.api.host._llm.close()
        join_all([thread])
        assert json.loads(found[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
        assert found[-1] == "data: [DONE]"


def test_metrics_have_vllms_stems() -> None:
    with serve() as served, served.http() as http:
        for _ in range(3):
            http.post("/v1/completions", json={**LONG, "prompt": [5] * 50, "max_tokens": 10})
        http.post("/v1/completions", json={"prompt": ""})
        lines = http.get("/metrics").text.splitlines()
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
        name = '{model_name="fake"}'
        assert values["cellar:prompt_tokens_total" + name] == 150
        assert values["cellar:generation_tokens_total" + name] == 30
        assert values["cellar:prefix_cache_queries_total" + name] == 150
        assert values["cellar:prefix_cache_hits_total" + name] == 2 * 48
        assert values["cellar:num_requests_running" + name] == 0
        assert values["cellar:time_to_first_token_seconds_count" + name] == 3
        assert values["cellar:inter_token_latency_seconds_count" + name] == 27
        assert values["cellar:e2e_request_latency_seconds_count" + name] == 3
        assert values['cellar:request_success_total{finished_reason="length",model_name="fake"}'] == 3
        route = 'cellar:http_responses_total{model_name="fake",route="/v1/completions",status="%d"}'
        assert (values[route % 200], values[route % 400]) == (3, 1)
