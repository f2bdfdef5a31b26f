"""What the log says of requests: never their text, and lines of bounded length."""

from __future__ import annotations

import logging

import pytest

from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.server.desk import without_text
from cellar.server.serving import MAX_PATH
from tests.fake_front import ROOMY
from tests.server.served import serve


def test_a_request_is_a_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = {"enable_log_requests": True, "log_level": "info"}
    with serve(options, **ROOMY) as served, served.http() as http:
        bias = {str(k): 1 for k in range(90)}
        body = {"prompt": [[5, 6]] * 100, "max_tokens": 1, "logit_bias": bias, "stop_token_ids": [7] * 900}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/v1/models/" + "a" * 50_000).status_code == 404
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("cellar", "uvicorn"))]
    said = next(line for line in lines if "prompt tokens" in line)
    assert "prompt tokens 200 in 100 prompts" in said
    assert "logit_bias 90 given" in said
    assert max(map(len, lines)) < MAX_PATH + 200


def test_parameters_without_what_quotes_the_user() -> None:
    grammar = StructuredOutputsParams(regex="secret")
    params = SamplingParams(temperature=0.5, stop="hush", stop_token_ids=[1, 2], structured_outputs=grammar)
    assert without_text(params) == ("temperature 0.5, stop 1 given, stop_token_ids 2 given, structured_outputs regex")
    assert without_text(SamplingParams()) == "as by default"
