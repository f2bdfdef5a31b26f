"""A model's own sampling defaults in the Python API and on the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cellar import LLM, AsyncLLM, SamplingParams
from cellar.cli.verb import SAMPLING, sampling_params
from cellar.core.errors import CheckpointError
from tests.tiny_checkpoint import write_checkpoint

SMALL: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 2}
MODELS = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 21, "do_sample": False}
PARAMS = SamplingParams(temperature=0.7, top_k=5, max_tokens=21)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), eos_token_id=None)
    (directory / "generation_config.json").write_text(json.dumps(MODELS))
    return directory


def tokens(llm: LLM, params: Any = None) -> list[int]:
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def test_requests_without_parameters_are_sampled_as_the_file_says(model: Path) -> None:
    with LLM(model, **SMALL) as llm:
        assert llm.get_default_sampling_params() == PARAMS
        made = [tokens(llm), tokens(llm, PARAMS)]
    assert len(made[0]) == 21
    with LLM(model, **SMALL) as llm:  # seeds are given in the order of requests
        assert [tokens(llm, PARAMS), tokens(llm)] == made
        assert len(tokens(llm, SamplingParams())) == 16
        *_, last = llm.stream(PROMPT)
        assert len(last.outputs[0].token_ids) == 21


def test_without_the_file(model: Path) -> None:
    with LLM(model, generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert len(tokens(llm)) == 16


def test_a_folder_of_ones_own_ends_answers_too(model: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, **SMALL) as llm:
        plain = tokens(llm, greedy)
    end = plain[6]
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0, "eos_token_id": end}))
    with LLM(model, generation_config=tmp_path, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        (output,) = llm.generate([PROMPT], use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].token_ids == plain[: plain.index(end) + 1]


def test_streams_of_many(model: Path) -> None:
    async def run() -> int:
        async with AsyncLLM(model, **SMALL) as llm:
            assert llm.get_default_sampling_params() == PARAMS
            async for output in llm.generate(PROMPT):
                last = output
            return len(last.outputs[0].token_ids)

    assert asyncio.run(run()) == 21


def test_a_bad_file_is_found_before_the_weights_are_read(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    (directory / "generation_config.json").write_text('{"top_p": 2}')
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used"):
        LLM(directory, **SMALL)


def test_the_command_line_has_defaults_for_models_without() -> None:
    options = {parameter.name: parameter.default for parameter in SAMPLING.parameters()}
    assert sampling_params(options) == SamplingParams(temperature=0.8, top_p=0.95, max_tokens=256)
    models = {"temperature": 0.6, "top_k": 20}
    assert sampling_params(options, models) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=256)
    given = options | {"temperature": 0.0, "top_k": 0, "max_tokens": 3}
    assert sampling_params(given, models) == SamplingParams(temperature=0, top_p=0.95, max_tokens=3)
