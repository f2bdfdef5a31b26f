"""What a request asks for, counted before any of it is done."""

from __future__ import annotations

from collections.abc import Sequence

from cellar.core.sampling import SamplingParams
from cellar.server.config import LimitConfig
from cellar.server.errors import refused


def check_sequences(num_prompts: int, n: int, limits: LimitConfig, prompts: str = "prompt") -> None:
    """Raise ApiError if prompts times n are too many; known before a prompt is tokenized. `prompts` names the field."""
    count, most = num_prompts * n, limits.max_request_sequences
    if count > most:
        parameter = "n" if num_prompts == 1 else prompts
        raise refused(
            f"{num_prompts} prompts with n {n} are {count} sequences, but a request may have {most}; send several.",
            parameter,
        )


def check_work(lengths: Sequence[int], params: SamplingParams, max_model_len: int, limits: LimitConfig) -> None:
    """Raise ApiError if prompts of so many tokens, with such parameters, are more than one request may ask."""
    check_sequences(len(lengths), params.n, limits)
    for name, listed in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if listed is not None and len(listed) > limits.max_listed_tokens:
            raise refused(
                f"{name} has {len(listed)} entries, but may have {limits.max_listed_tokens}; list fewer.", name
            )
    count, most = _logprobs(lengths, params, max_model_len), limits.max_request_logprobs
    if count > most:
        parameter = "logprobs" if params.prompt_logprobs is None else "prompt_logprobs"
        raise refused(
            f"the answer may have {count} log-probabilities, but this server makes {most} for a request; ask for fewer "
            "alternatives, a lower max_tokens or n, or send the prompts in several requests.",
            parameter,
        )


def _logprobs(lengths: Sequence[int], params: SamplingParams, max_model_len: int) -> int:
    """Entries that an answer has at most: a choice repeats its prompt's."""
    count = 0
    for length in lengths:
        if params.logprobs is not None:
            room = max_model_len - length
            count += min(params.max_tokens or room, room) * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            count += length * (params.prompt_logprobs + 1)
    return count * params.n
