from __future__ import annotations

import math
from typing import Any

import pytest

from cellar.core.errors import CellarError, RequestError
from cellar.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("n", 2**20),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", 1e39),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**70),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("seed", 2**63),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**70]),
        ("stop_token_ids", 3),
        ("ignore_eos", "no"),
        ("detokenize", 0),
        ("structured_outputs", {"json": {}}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", [1]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert isinstance(caught.value, CellarError)


def test_limits_that_are_allowed() -> None:
    params = SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=0, max_tokens=None, seed=-(2**63), logprobs=20)
    assert params.greedy
    assert not params.penalized


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens 9 is larger than max_tokens 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9
    with pytest.raises(RequestError, match="min_tokens is 1180591620717411303424"):
        SamplingParams(min_tokens=2**70, max_tokens=None)


def test_stop_strings_are_a_tuple_whatever_was_given() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="end", detokenize=False)


def test_clone_validates_again() -> None:
    params = SamplingParams(stop=["x"], max_tokens=4)
    copy = params.clone(max_tokens=5, stop="y")
    assert (copy.max_tokens, copy.stop_strings) == (5, ("y",))
    with pytest.raises(RequestError):
        params.clone(top_p=2)
