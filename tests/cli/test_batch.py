"""`cellar batch`: over the fake device, killed in the middle and resumed, with every kind of bad line; and the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cellar.engine.opened
from cellar.cli.main import build
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.extras import command
from cellar.core.messages import StepPlan
from cellar.engine.opened import Opened
from cellar.server.batch import BadLine, BatchRequest, ResultFile, read_requests
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from tests.fake_front import continuation, engine_of, open_fake
from tests.limits import SECONDS, until
from tests.server.served import TEXT, VOCAB

APP = build()
ROOT = Path(__file__).parent.parent.parent


def open_for_batch(
    config: EngineConfig, wrap: object = None, latency: float | Callable[[StepPlan], float] = 0.0
) -> Opened:
    """In the place of open_front: the fake device, with grammars."""
    masker = Masker(GrammarCompiler(TEXT, VOCAB, (2,)))
    opened, _ = open_fake(num_rows=8, num_slots=256, seed=config.model.seed, latency=latency, masker=masker)
    return opened


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake has no layers whose steps this machine's profile could predict."""
    monkeypatch.setattr("cellar.reports.forecast.default_path", lambda machine: tmp_path / "none.json")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Batches run over the fake device; tells how often it was opened."""
    opened: list[EngineConfig] = []

    def note(config: EngineConfig, wrap: object) -> Opened:
        opened.append(config)
        return open_for_batch(config)

    monkeypatch.setattr(cellar.engine.opened, "open_front", note)
    return opened


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    if url == "/v1/completions":
        body = {"prompt": [5, 6, 7], **body}
    if "completions" in url:
        body = {"max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Sequence[Any]) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def run(source: Path, output: Path, *flags: str) -> Result:
    return CliRunner().invoke(APP, ["batch", str(source), "-o", str(output), *flags])


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    found = results(path)
    answered = [r for r in found if r["response"] is not None]
    assert len({r["custom_id"] for r in answered}) == len(answered)
    return {r["custom_id"]: r["response"] for r in answered}


# -- what comes out -------------------------------------------------------------------------------


def test_both_endpoints_with_everything_that_the_server_has(tmp_path: Path, fake: list[EngineConfig]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    asked = {"role": "user", "content": "Where?"}
    chat = "/v1/chat/completions"
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    source = write(
        tmp_path / "in.jsonl",
        [
            request("ids", prompt=[5, 6, 7], max_tokens=6, temperature=0, ignore_eos=True, return_token_ids=True),
            request("two", prompt=["a house", "a tree"], n=2, max_tokens=3, ignore_eos=True),
            request("chat", chat, messages=[asked], max_tokens=4, ignore_eos=True),
            request("json", chat, messages=[asked], max_tokens=100, response_format=json_schema),
            request("choice", prompt="pick", max_tokens=20, structured_outputs={"choice": ["left", "right"]}),
        ],
    )
    done = run(source, tmp_path / "out.jsonl")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "5 succeeded, 0 failed" in done.stdout
    found = by_id(tmp_path / "out.jsonl")
    assert {response["status_code"] for response in found.values()} == {200}
    ids = found["ids"]["body"]
    assert ids["choices"][0]["token_ids"][:1] == continuation([5, 6, 7], 1, VOCAB)
    assert found["ids"]["request_id"] == ids["id"]
    assert ids["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(found["two"]["body"]["choices"]) == 4
    assert found["chat"]["body"]["object"] == "chat.completion"
    assert json.loads(found["json"]["body"]["choices"][0]["message"]["content"]) == {"a": "x"}
    assert found["choice"]["body"]["choices"][0]["text"] in ("left", "right")
    for record in results(tmp_path / "out.jsonl"):
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["id"].startswith("batch_req_")
        assert record["error"] is None


def test_vectors_scores_and_rankings(tmp_path: Path, fake: list[EngineConfig]) -> None:
    lines = [
        request("vector", "/v1/embeddings", input=["a house", "a tree"]),
        request("score", "/v1/score", text_1="a house", text_2=["a house"]),
        request("ranking", "/v1/rerank", query="a tree", documents=["a house", "a tree"]),
    ]
    done = run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert done.exit_code == 0, (done.output, done.exception)
    found = {id: response["body"] for id, response in by_id(tmp_path / "out.jsonl").items()}
    assert [len(one["embedding"]) for one in found["vector"]["data"]] == [3, 3]
    assert found["score"]["data"][0]["score"] == pytest.approx(1.0)
    assert [one["index"] for one in found["ranking"]["results"]] == [1, 0]


def test_the_openai_client_s_types_fit(tmp_path: Path, fake: list[EngineConfig]) -> None:
    from openai.types import Completion

    run(write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl")
    Completion.model_validate(by_id(tmp_path / "out.jsonl")["a"]["body"], strict=True)


def test_errors_stand_in_their_lines(tmp_path: Path, fake: list[EngineConfig]) -> None:
    lines: list[Any] = [
        request("good"),
        "no json",
        "[1, 2]",
        {"method": "POST", "url": "/v1/completions", "body": {}},
        {**request("x"), "custom_id": 7},
        request("good", max_tokens=9),
        {**request("get"), "method": "GET"},
        request("where", "/v1/images", prompt="a"),
        {"custom_id": "bodyless", "method": "POST", "url": "/v1/completions"},
        {**request("more"), "priority": 3},
        "",
        request("unknown", best_of=3),
        request("other", model="gpt-5"),
        request("empty", prompt=[]),
        request("streamed", stream=True),
        request("typed", max_tokens="5"),
        request("long", prompt=[5] * 5000),
        request("schema", structured_outputs={"regex": "(("}),
        "[" * 100_000,
        request("last"),
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = run(source, output)
    assert done.exit_code == 1
    assert "2 succeeded, 17 failed" in done.stdout
    bad = {r["error"]["line"]: r["error"]["code"] for r in results(output) if r["error"]}
    assert bad == {
        2: "invalid_json_line",
        3: "invalid_json_line",
        4: "missing_required_parameter",
        5: "missing_required_parameter",
        6: "duplicate_custom_id",
        7: "invalid_method",
        8: "invalid_url",
        9: "missing_required_parameter",
        10: "unknown_parameter",
        19: "invalid_json_line",
    }
    found = by_id(output)
    assert len(found["good"]["body"]["choices"]) == 1
    assert found["last"]["status_code"] == 200
    refused = {"unknown": "best_of", "streamed": "stream", "typed": "max_tokens", "long": "prompt", "empty": "prompt"}
    for custom_id, parameter in {**refused, "schema": "structured_outputs"}.items():
        assert found[custom_id]["status_code"] == 400
        assert found[custom_id]["body"]["error"]["param"] == parameter
    assert found["other"]["status_code"] == 404
    again = run(source, output)
    assert again.exit_code == 1  # it says what the file says
    assert "0 succeeded, 0 failed, 19 were done before (17 of them failed)" in again.stdout
    assert len(fake) == 1  # the model was not even loaded


def test_a_bad_line_that_was_mended_is_done(tmp_path: Path, fake: list[EngineConfig]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request("a"), "oops"]), tmp_path / "out.jsonl"
    assert run(source, output).exit_code == 1
    write(source, [request("a"), request("b")])
    assert "1 succeeded, 0 failed, 1 were done before" in run(source, output).stdout
    assert set(by_id(output)) == {"a", "b"}


def test_custom_ids_of_any_text(tmp_path: Path, fake: list[EngineConfig]) -> None:
    ids = ["ä/ö", "a b\n", "\ud800", "😀", "x" * 5000]
    source, output = write(tmp_path / "in.jsonl", [request(id) for id in ids]), tmp_path / "out.jsonl"
    assert run(source, output).exit_code == 0
    assert set(by_id(output)) == set(ids)
    assert "5 were done before" in run(source, output).stdout


# -- going on -------------------------------------------------------------------------------------


def test_a_torn_last_line_is_mended(tmp_path: Path, fake: list[EngineConfig]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request(str(k)) for k in range(6)]), tmp_path / "out.jsonl"
    run(source, output)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        output.write_bytes(whole[:-cut])
        done = run(source, output)
        assert "1 succeeded, 0 failed, 5 were done before" in done.stdout
        assert output.read_bytes().startswith(b"".join(lines[:-1]))
        assert set(by_id(output)) == set("012345")


def test_answers_do_not_depend_on_interruptions(tmp_path: Path, fake: list[EngineConfig]) -> None:
    """Requests without a seed of their own get one from their id, wherever the run began."""
    seeds = {}
    for name, first in (("a", 0), ("b", 4)):
        source, output = write(tmp_path / f"{name}.jsonl", [request(str(k)) for k in range(6)]), tmp_path / name
        if first:
            write(tmp_path / "part.jsonl", [request(str(k)) for k in reversed(range(first))])
            run(tmp_path / "part.jsonl", output, "--max-in-flight", "1")
        run(source, output)
        seeds[name] = {id: r["body"]["choices"][0]["text"] for id, r in by_id(output).items()}
    assert seeds["a"] == seeds["b"]


def test_other_files_are_left_alone(tmp_path: Path, fake: list[EngineConfig]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    foreign = ("my notes\n", '{"custom_id": "a"}\n', "[]\n", '{"response": null, "error": {}}\n')
    for text in (*foreign, "one line of notes without an end", '{"id":"x', '{"id": "batch_req_'):
        output.write_text(text)
        done = run(source, output)
        assert done.exit_code == 2
        assert "line 1 of" in done.stderr
        assert output.read_text() == text
    done = run(source, source)
    assert done.exit_code == 2
    assert "the output is the input" in done.stderr
    done = run(tmp_path / "none.jsonl", tmp_path / "new.jsonl")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr
    assert not (tmp_path / "new.jsonl").exists()
    done = run(source, tmp_path / "no" / "where.jsonl")
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
    assert not fake


def test_one_batch_per_output(tmp_path: Path, fake: list[EngineConfig]) -> None:
    source, output = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    with ResultFile(output):
        done = run(source, output)
        assert done.exit_code == 2
        assert "written by another batch" in done.stderr
    assert run(source, output).exit_code == 0


def test_an_engine_that_fails_ends_the_batch_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: EngineConfig, wrap: object) -> Opened:
        opened = open_for_batch(config)
        engine, commits = engine_of(opened), []
        commit = engine.scheduler.commit

        def fails(result: Any, now: float) -> Any:
            commits.append(result)
            if len(commits) > 20:
                raise RuntimeError("the device is gone")
            return commit(result, now)

        engine.scheduler.commit = fails  # type: ignore[method-assign]
        return opened

    monkeypatch.setattr(cellar.engine.opened, "open_front", failing)
    source, output = write(tmp_path / "in.jsonl", [request(str(k)) for k in range(30)]), tmp_path / "out.jsonl"
    done = run(source, output, "--max-in-flight", "4")
    assert done.exit_code == 2
    assert "run the same command again" in done.stderr
    left = by_id(output)
    assert 0 < len(left) < 30
    assert {r["status_code"] for r in left.values()} == {200}
    monkeypatch.setattr(cellar.engine.opened, "open_front", open_for_batch)
    assert run(source, output).exit_code == 0
    assert set(by_id(output)) == {str(k) for k in range(30)}


def test_many_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    expected = 16  # twice the rows, unless told otherwise

    def counted(config: EngineConfig, wrap: object) -> Opened:
        opened = open_for_batch(config)
        engine = engine_of(opened)
        commit, poll = engine.scheduler.commit, engine.runtime.poll
        begun, end = False, time.monotonic() + SECONDS

        def held(timeout: float | None) -> Any:
            """No step ends before as many requests are there as may be."""
            nonlocal begun
            stats = engine.stats()
            begun = begun or stats.running + stats.waiting == expected
            if begun:
                return poll(timeout)
            assert time.monotonic() < end, f"not {expected} in flight, but {stats}"
            time.sleep(0.001)
            return []

        def note(result: Any, now: float) -> Any:
            output = commit(result, now)
            steps.append(len(output.ids))
            return output

        engine.scheduler.commit = note  # type: ignore[method-assign]
        engine.runtime.poll = held  # type: ignore[method-assign]
        return opened

    monkeypatch.setattr(cellar.engine.opened, "open_front", counted)
    lines = [request(str(k), max_tokens=20, ignore_eos=True) for k in range(64)]
    run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert sum(steps) == 64 * 20
    full = sum(count == 8 for count in steps)  # the fake has 8 rows
    assert full > 0.9 * 64 * 20 / 8
    steps.clear()
    expected = 2
    run(tmp_path / "in.jsonl", tmp_path / "other.jsonl", "--max-in-flight", "2")
    assert max(steps) == 2


_OVER_THE_FAKE = """
import sys
import cellar.engine.opened
from tests.cli.test_batch import open_for_batch
last = int(sys.argv.pop(1))  # the step that the device does not survive
stall = lambda plan: 3600.0 if plan.step == last else 0.0
cellar.engine.opened.open_front = lambda config, wrap: open_for_batch(config, wrap, stall)
from cellar.cli.main import main
main()
"""


@pytest.mark.long
def test_killed_again_and_again_it_comes_to_the_end(tmp_path: Path, fake: list[EngineConfig]) -> None:
    source = write(tmp_path / "in.jsonl", [request(str(k), max_tokens=10, ignore_eos=True) for k in range(160)])
    output = tmp_path / "out.jsonl"
    batch = ["batch", str(source), "-o", str(output), "--max-in-flight", "8"]
    killed = [sys.executable, "-c", _OVER_THE_FAKE, "60", *batch]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kept = 0
    for _ in range(2):
        process = subprocess.Popen(killed, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        until(lambda want=kept + 20: output.exists() and output.read_bytes().count(b"\n") >= want)  # type: ignore[misc]
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        kept = len(by_id_torn(output))
        assert kept < 160
    last = run(source, output)
    assert last.exit_code == 0, last.stderr
    assert f"{160 - kept} succeeded, 0 failed, {kept} were done before" in last.stdout
    assert set(by_id(output)) == {str(k) for k in range(160)}


@pytest.mark.long
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_records_no_cancellation_as_a_result(tmp_path: Path, presses: int, fake: list[EngineConfig]) -> None:
    """The first finishes what runs, here nothing but the device's last step; the second drops it."""
    source = write(tmp_path / "in.jsonl", [request(str(k), max_tokens=10, ignore_eos=True) for k in range(160)])
    output = tmp_path / "out.jsonl"
    batch = ["batch", str(source), "-o", str(output), "--max-in-flight", "8"]
    slow = _OVER_THE_FAKE.replace("3600.0 if plan.step == last else 0.0", "0.03")
    stuck = _OVER_THE_FAKE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", slow if presses == 1 else stuck, "60", *batch]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 16)
        process.send_signal(signal.SIGINT)
        if presses == 2:
            assert process.stderr is not None
            assert b"press Ctrl-C again" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert b"run the same command again" in said
    assert b"Traceback" not in said
    found = by_id(output)
    assert {response["status_code"] for response in found.values()} == {200}
    assert 16 <= len(found) < 160
    last = run(source, output)
    assert f"{160 - len(found)} succeeded, 0 failed, {len(found)} were done before" in last.stdout
    assert set(by_id(output)) == {str(k) for k in range(160)}


@pytest.mark.long
def test_results_into_a_pipe(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(str(k)) for k in range(3)])
    command = [sys.executable, "-c", _OVER_THE_FAKE, "-1", "batch", str(source), "-o", "/dev/stdout"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["custom_id"] for line in done.stdout.splitlines()} == set("012")
    assert "3 succeeded" in done.stderr


def by_id_torn(path: Path) -> set[str]:
    """Whole lines of a file whose last one may be cut."""
    return {json.loads(line)["custom_id"] for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")}


def test_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request("a"), "", "x"])
    good, bad = read_requests(path)
    assert good == BatchRequest(1, "a", "/v1/completions", {"max_tokens": 5, "prompt": [5, 6, 7]}, 111)
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.code) == (3, "invalid_json_line")
    with pytest.raises(ConfigError, match="not a pipe or a folder"):
        list(read_requests(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_requests(tmp_path / "none"))


def test_without_the_server_extra_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "cellar.server.batch", raising=False)
    done = run(write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert done.stderr.strip().endswith("run " + command("server"))
