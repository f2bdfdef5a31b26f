"""generation_config.json: how a model's makers sample from it, for requests that do not say how themselves.

Read are the fields that vLLM reads. `do_sample` is none of them: a request is greedy if its temperature is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cellar.core.errors import CheckpointError, ConfigError, RequestError
from cellar.core.sampling import SamplingParams
from cellar.text.tokenizer import read_json, token_ids

FILE = "generation_config.json"

AUTO, NONE = "auto", "vllm"
"""Values of the option: the model's own file, or none. Any other is a folder."""

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file -> those of SamplingParams."""


@dataclass(frozen=True)
class GenerationConfig:
    """`sampling`: defaults for fields of SamplingParams. `eos_token_ids` end an answer, as those of the model do."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    def params(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        """How to sample: as given, and by these defaults where nothing is. Raises RequestError."""
        return SamplingParams(**{**self.sampling, **(given or {})})


NEUTRAL = GenerationConfig()
"""Of a model that says nothing: the defaults of SamplingParams."""


def read_generation_config(option: str, checkpoint: Path | None) -> GenerationConfig:
    """What the option says: `auto`, the model's (`checkpoint`, where there is one); `vllm`, nothing; else a folder's.

    Raises ConfigError if that folder has no such file, CheckpointError if a value is out of range.
    """
    if option == NONE:
        return NEUTRAL
    if option == AUTO:
        file = None if checkpoint is None else checkpoint / FILE
    else:
        file = Path(option).expanduser() / FILE
        if not file.is_file():
            raise ConfigError(
                f"generation_config is {option!r}, but {file} is not a file; give auto, vllm or its folder."
            )
    values = {} if file is None else read_json(file)
    found = {ours: values[theirs] for theirs, ours in _FIELDS.items() if values.get(theirs) is not None}
    config = GenerationConfig(found, tuple(token_ids(values.get("eos_token_id"))))
    try:
        config.params()
    except RequestError as error:
        reason = str(error).rstrip(".").replace("max_tokens", "max_new_tokens")
        raise CheckpointError(
            f"{file} cannot be used ({reason}); correct it, or leave it out by setting generation_config to vllm."
        ) from error
    return config
