"""generation_config.json: what is read of it, what is ignored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cellar.core.errors import CellarError, CheckpointError, ConfigError
from cellar.core.sampling import SamplingParams
from cellar.text.generation import GenerationConfig, read_generation_config

# As Qwen's and Llama's are.
USUAL = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [5, 6],
    "pad_token_id": 0,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "transformers_version": "4.51.0",
}


def written(directory: Path, values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_the_models_own_file(tmp_path: Path) -> None:
    found = read_generation_config("auto", written(tmp_path, USUAL))
    assert found.sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert found.eos_token_ids == (5, 6)
    assert found.params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=2048
    )


def test_what_is_given_wins_at_any_value(tmp_path: Path) -> None:
    config = read_generation_config("auto", written(tmp_path, USUAL))
    given = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": None}
    assert config.params(given) == SamplingParams(temperature=0, max_tokens=None)
    assert config.params({"seed": 3}).temperature == 0.6


def test_no_file_or_no_wish_for_it(tmp_path: Path) -> None:
    plain = GenerationConfig()
    assert plain.params() == SamplingParams()
    assert read_generation_config("auto", None) == plain
    assert read_generation_config("auto", tmp_path) == plain
    assert read_generation_config("vllm", written(tmp_path, USUAL)) == plain


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    model, mine = written(tmp_path / "model", USUAL), written(tmp_path / "mine", {"min_p": 0.1, "eos_token_id": 7})
    found = read_generation_config(str(mine), model)
    assert (found.sampling, found.eos_token_ids) == ({"min_p": 0.1}, (7,))
    for wrong in ("none", str(tmp_path), str(mine / "generation_config.json")):
        with pytest.raises(ConfigError, match="is not a file; give auto, vllm or its folder"):
            read_generation_config(wrong, model)


def test_nulls_and_unknown_fields_say_nothing(tmp_path: Path) -> None:
    values = dict.fromkeys(USUAL) | {"num_beams": 4, "penalty_alpha": 0.6, "stop": 3, "seed": "x", "n": 0}
    assert read_generation_config("auto", written(tmp_path, values)) == GenerationConfig()


def test_do_sample_is_not_read(tmp_path: Path) -> None:
    for flag in (True, False, "no"):
        assert read_generation_config("auto", written(tmp_path, {"do_sample": flag})) == GenerationConfig()
        assert read_generation_config("auto", written(tmp_path, {"do_sample": flag, "top_p": 0.5})).params() == (
            SamplingParams(top_p=0.5)
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature is -1, but must be from 0 to 100"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, r"top_p is 0, but must be in \(0, 1\]"),
        ({"top_k": 5.5}, "top_k is 5.5, but must be an integer"),
        ({"min_p": True}, "min_p is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be an integer from 1"),
        ([1], "must hold a JSON object"),
    ],
)
def test_values_that_no_request_may_have_are_refused_with_one_sentence(
    values: Any, message: str, tmp_path: Path
) -> None:
    directory = written(tmp_path, values)
    for option, checkpoint in (("auto", directory), (str(directory), None)):
        with pytest.raises(CheckpointError, match=message) as caught:
            read_generation_config(option, checkpoint)
        assert "\n" not in str(caught.value)
        assert "generation_config.json" in str(caught.value)
    if isinstance(values, dict):
        read_generation_config("vllm", directory)


def test_no_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CellarError, match="not readable JSON"):
        read_generation_config("auto", tmp_path)
