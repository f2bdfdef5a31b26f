"""Clients that cannot be installed beside the rest, each on its main path and by its own package.

Each has an environment of its own; the server is in this process, over the fake device that says what it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import environment, run, run_program
from tests.fake_front import TOKENIZER
from tests.server.served import MODEL, Served, serve
from tests.server.spoken import paced, says, says_in_turn

pytestmark = pytest.mark.long

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANIMAL = '{"name": "fox", "legs": 4}'
RAIN = "It rains."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"tool_call_parser": "hermes"}, max_model_len=8192, num_slots=2048) as served:
        yield served
        served.settle()


def test_litellm(served: Served, tmp_path: Path) -> None:
    with paced(served, 0.03), says_in_turn(served, RAIN, RAIN, CALL, "It rains in Rome.", ANIMAL):
        run_program("litellm", "litellm_client.py", tmp_path, served.url)


def test_instructor(served: Served, tmp_path: Path) -> None:
    with says(served, ANIMAL):
        run_program("instructor", "instructor_client.py", tmp_path, served.url)


def test_llama_index(served: Served, tmp_path: Path) -> None:
    required = f'[{{"name": "Animal", "arguments": {ANIMAL}}}]'
    with paced(served, 0.03), says_in_turn(served, RAIN, RAIN, CALL, required):
        run_program("llama-index", "llama_index_client.py", tmp_path, served.url)


def test_inspect_ai(served: Served, tmp_path: Path) -> None:
    with says(served, "Rome"):
        run_program("inspect-ai", "inspect_client.py", tmp_path, served.url, str(tmp_path / "logs"))


def test_guidellm(served: Served, tmp_path: Path) -> None:
    """A load test of six requests, two at a time."""
    command: list[str | Path] = [environment("guidellm") / "guidellm", "run"]
    for option, wish in {
        "backend": f"kind=openai_http,target={served.url},model={MODEL}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }.items():
        command += [f"--{option}", wish]
    run([*command, "--disable-console"], tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (6, 0)
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (16, 16)


def test_aider(served: Served, tmp_path: Path) -> None:
    """It asks for an edit, and applies it."""
    file = tmp_path / "hello.py"
    file.write_text('print("nothing")\n')
    about = ["--openai-api-base", f"{served.url}/v1", "--openai-api-key", "none", "--edit-format", "whole"]
    quiet = [
        "--yes-always",
        "--no-git",
        "--no-show-model-warnings",
        "--no-check-update",
        "--no-analytics",
        "--no-pretty",
    ]
    with says(served, 'hello.py\n```\nprint("hello")\n```\n'):
        command = [environment("aider") / "aider", "--model", f"openai/{MODEL}", *about, *quiet]
        said = run([*command, "--message", "Say hello.", file.name], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert "Applied edit to hello.py" in said
    assert file.read_text() == 'print("hello")\n'
