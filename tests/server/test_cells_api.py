"""A server of cells: endpoints from a user's file, JSON and msgpack, streams, bad input, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cellar.cli.cells_file import load_models
from cellar.cli.main import build
from cellar.core.errors import ConfigError
from cellar.engine.cells import CellEngine
from cellar.server.cells.app import build_cells_app
from cellar.server.cells.run import check_options
from cellar.server.config import LimitConfig, ServerConfig
from tests.limits import SECONDS, asked, until
from tests.server.served import raw, running

MODELS = Path(__file__).parent.parent / "data" / "cells" / "models.py"
SLOW: dict[str, Any] = {"how": "slow", "steps": 50_000}
"""Of a millisecond for eight."""


@dataclass
class Cells:
    """A server that runs, and its engine."""

    url: str
    engine: CellEngine
    app: Any

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS)

    def settle(self) -> None:
        """Wait until nothing runs; then the books must balance and every row be free."""
        admission = self.app.state.api.admission
        until(lambda: not self.engine.engine.has_work() and not admission.num_requests)
        asked(self.engine.engine, self.engine.scheduler.check_integrity)
        assert (admission.num_requests, admission.num_tokens) == (0, 0)


@contextmanager
def serve(limits: dict[str, Any] | None = None, **server: Any) -> Iterator[Cells]:
    models = load_models(MODELS)
    engine = CellEngine.open(models, ("cpu",), num_threads=1, memory_bytes=1 << 22)
    app = build_cells_app(engine, ServerConfig(**server), LimitConfig(**limits or {}))
    with running(app) as url:
        yield Cells(url, engine, app)
    assert not engine.running


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    with serve() as served:
        yield served


def evaluated(cells: Cells, model: str, fields: dict[str, Any]) -> Any:
    return cells.engine.models[model].evaluate(fields)


def test_json_and_msgpack(cells: Cells) -> None:
    expected = evaluated(cells, "classify", {"tokens": [3, 1, 4]})
    with cells.http() as http:
        answer = http.post("/v1/cells/classify", json={"tokens": [3, 1, 4], "model": "classify"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()
        assert body["object"] == "cells.result"
        assert body["model"] == "classify"
        assert body["output"]["label"] == expected["label"]
        np.testing.assert_allclose(body["output"]["logits"], expected["logits"], atol=1e-5)
        headers = {"content-type": "application/msgpack"}
        packed = http.post("/v1/cells/classify", content=msgpack.packb({"tokens": [3, 1, 4]}), headers=headers)
        assert packed.headers["content-type"] == "application/msgpack"
        assert msgpack.unpackb(packed.content)["output"] == body["output"]
        wanted = http.post("/v1/cells/classify", json={"tokens": [3, 1, 4]}, headers={"accept": "application/msgpack"})
        assert msgpack.unpackb(wanted.content)["output"] == body["output"]


def test_arrays_in_msgpack(cells: Cells) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
    expected = evaluated(cells, "features", {"x": x})
    packed = {"x": {"dtype": "float32", "shape": [3, 4], "data": x.tobytes()}}
    with cells.http() as http:
        headers = {"content-type": "application/msgpack"}
        binary = http.post("/v1/cells/features", content=msgpack.packb(packed), headers=headers)
        lists = http.post("/v1/cells/features", json={"x": x.tolist()})
    np.testing.assert_allclose(msgpack.unpackb(binary.content)["output"], expected, atol=1e-5)
    np.testing.assert_allclose(lists.json()["output"], expected, atol=1e-5)


def test_a_growing_response_streams(cells: Cells) -> None:
    fields = {"tokens": [5, 6, 7], "steps": 12}
    with cells.http() as http:
        whole = http.post("/v1/cells/translate", json=fields).json()["output"]
        with http.stream("POST", "/v1/cells/translate", json={**fields, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    *events, last, done = lines
    assert done == "[DONE]"
    assert json.loads(last)["object"] == "cells.result"
    assert json.loads(last)["output"] == whole
    chunks = [json.loads(one) for one in events]
    assert all(chunk["object"] == "cells.chunk" for chunk in chunks)
    assert [token for chunk in chunks for token in chunk["output"]["token"]] == whole["token"]
    assert len(whole["token"]) == 12
    cells.settle()


def test_what_is_here(cells: Cells) -> None:
    with cells.http() as http:
        listed = {one["id"]: one for one in http.get("/v1/cells").json()["data"]}
        assert set(listed) == {"classify", "features", "translate", "fragile"}
        assert listed["translate"]["streams"]
        assert not listed["classify"]["streams"]
        assert listed["classify"]["request"]["properties"]["tokens"]["type"] == "array"
        assert http.post("/v1/cells/nothing", json={}).json()["error"]["code"] == "model_not_found"
        document = http.get("/openapi.json").json()
        body = document["paths"]["/v1/cells/translate"]["post"]["requestBody"]["content"]
        assert set(body) == {"application/json", "application/msgpack"}
        assert set(body["application/json"]["schema"]["required"]) == {"tokens", "steps"}
        assert http.get("/health").status_code == 200
        assert "version" in http.get("/version").json()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "body", "parameter"),
    [
        ("classify", {"tokens": "abc"}, "tokens"),
        ("classify", {}, "tokens"),
        ("classify", {"tokens": [1], "tokenz": 1}, "tokenz"),
        ("classify", {"tokens": [1], "stream": True}, "stream"),
        ("classify", {"tokens": [1], "model": "translate"}, "model"),
        ("classify", {"tokens": [10_000]}, None),  # no such word
        ("classify", {"tokens": []}, None),  # unfold raises
        ("translate", {"tokens": [1], "steps": 10**6}, None),  # a million nodes
        ("translate", {"tokens": [1], "steps": -1}, None),
        ("fragile", {"how": "loop"}, None),
        ("fragile", {"how": "nothing"}, None),
        ("fragile", {"how": "nan"}, None),
        ("fragile", {"how": "raise"}, None),
        ("fragile", {"how": "shape"}, None),
    ],
)
def test_bad_input_gets_a_clear_error_and_neighbours_none(
    cells: Cells, model: str, body: dict[str, Any], parameter: str | None
) -> None:
    expected = evaluated(cells, "fragile", {"how": "good"})
    with cells.http() as http, ThreadPoolExecutor(4) as pool:
        good = [pool.submit(http.post, "/v1/cells/fragile", json={"how": "good"}) for _ in range(4)]
        answer = http.post(f"/v1/cells/{model}", json=body)
        more = [pool.submit(http.post, "/v1/cells/fragile", json={"how": "good"}) for _ in range(4)]
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == parameter
        assert len(error["message"]) > 20
        for one in good + more:
            assert one.result().status_code == 200
            np.testing.assert_allclose(one.result().json()["output"], expected, atol=1e-6)
        assert http.get("/health").status_code == 200
    cells.settle()


def test_bodies_that_are_none(cells: Cells) -> None:
    with cells.http() as http:
        for content, kind, status in (
            (b"{", "application/json", 400),
            (b"\xff{}", "application/json", 400),
            (b'{"tokens": [NaN]}', "application/json", 400),
            (b"\xc1", "application/msgpack", 400),
            (b"\x81\xa6tokens", "application/msgpack", 400),
            (b"[1]", "application/json", 400),
            (b"tokens=1", "application/x-www-form-urlencoded", 415),
        ):
            answer = http.post("/v1/cells/classify", content=content, headers={"content-type": kind})
            assert answer.status_code == status, (content, answer.text)
            assert answer.json()["error"]["message"]


def test_metrics(cells: Cells) -> None:
    with cells.http() as http:
        http.post("/v1/cells/classify", json={"tokens": [1, 2]})
        http.post("/v1/cells/fragile", json={"how": "nan"})
        cells.settle()
        text = http.get("/metrics").text
    for line in (
        "cellar:engine_up 1.0",
        'cellar:request_success_total{finished_reason="error",model_name="fragile"}',
        'cellar:e2e_request_latency_seconds_bucket{le="0.0005",model_name="classify"}',
        'cellar:http_responses_total{route="/v1/cells/classify",status="200"}',
        "cellar:num_requests_running 0.0",
        "cellar:cell_nodes_total",
    ):
        assert line in text, line


def test_keys_and_sizes() -> None:
    with serve({"max_body_bytes": 1000}, api_key="secret") as served, served.http() as http:
        assert http.post("/v1/cells/classify", json={"tokens": [1]}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert http.post("/v1/cells/classify", json={"tokens": [1]}, headers=headers).status_code == 200
        assert http.post("/v1/cells/classify", json={"tokens": [1] * 600}, headers=headers).status_code == 413
        assert http.get("/health").status_code == 200


def test_too_many_that_wait() -> None:
    with serve({"max_queued_requests": 2}) as served, served.http() as http:
        others = [raw(served.url, SLOW, "/v1/cells/fragile") for _ in range(2)]
        stats, admission = served.engine.stats, served.app.state.api.admission
        until(lambda: stats().running + stats().waiting == admission.num_requests == 2)
        refused = http.post("/v1/cells/classify", json={"tokens": [1]})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        for sock in others:
            sock.close()
        served.settle()
        assert served.engine.stats().nodes < SLOW["steps"]
        assert http.post("/v1/cells/classify", json={"tokens": [1]}).status_code == 200


def test_a_deadline() -> None:
    with serve({"request_timeout": 0.5}) as served, served.http() as http:
        answer = http.post("/v1/cells/fragile", json=SLOW)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        served.settle()
        assert served.engine.stats().nodes < SLOW["steps"]


def test_a_client_that_goes_frees_its_rows(cells: Cells) -> None:
    with cells.http() as http:
        before = cells.engine.stats().nodes
        body = {"tokens": [1], "steps": 90_000, "stream": True}
        with http.stream("POST", "/v1/cells/translate", json=body) as answer:
            lines = answer.iter_lines()  # held: a generator that is dropped closes the connection
            assert json.loads(next(lines).removeprefix("data: "))["object"] == "cells.chunk"
            assert cells.engine.stats().running == 1
    cells.settle()
    assert cells.engine.stats().running == 0
    assert cells.engine.stats().nodes < before + 90_000


def test_a_stopped_engine_says_so() -> None:
    with serve() as served, served.http() as http:
        served.engine.close()
        assert http.get("/health").status_code == 503
        answer = http.post("/v1/cells/classify", json={"tokens": [1]})
        assert answer.status_code == 503
        assert "cellar:engine_up 0.0" in http.get("/metrics").text


def test_files_that_hold_no_model(tmp_path: Path) -> None:
    def written(text: str) -> Path:
        path = tmp_path / "models_here.py"
        path.write_text(text, encoding="utf-8")
        return path

    for text, reason in (
        ("x = 1\n", "makes no CellModel"),
        ("x = 1\n1 / 0\n", ":2 raised ZeroDivisionError"),
        ("def f(:\n", ":1 raised SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_models(written(text))
    with pytest.raises(ConfigError, match="not there"):
        load_models(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match="tool_call_parser has no effect"):
        check_options(ServerConfig(tool_call_parser="hermes"), LimitConfig())
    with pytest.raises(ConfigError, match="max_prompt_len"):
        check_options(ServerConfig(), LimitConfig(max_prompt_len=5))


def test_the_models_of_a_file() -> None:
    torch.manual_seed(0)
    assert [model.name for model in load_models(MODELS)] == ["classify", "features", "translate", "fragile"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cells", "absent.py"], "is not there"),
        (["--cells", str(MODELS), "--dtype", "bfloat16"], "dtype has no effect"),
        (["a-model", "--cells", str(MODELS)], "model has no effect"),
        (["--cells", str(MODELS), "--api-server-count", "2"], "api_server_count has no effect"),
    ],
)
def test_options_of_the_command(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(build(), ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2
    assert reason in result.output
