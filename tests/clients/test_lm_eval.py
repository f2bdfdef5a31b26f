"""lm-eval says of this server what it says of transformers: last words of LAMBADA's test split, the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.clients.environments import run_program
from tests.limits import ROOT
from tests.server.served import running_demo

pytestmark = pytest.mark.long

LAMBADA = ROOT.parent / "shared" / "data" / "lambada" / "lambada_test.jsonl"
LINES = 32


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_demo("--dtype", "float32") as url:
        yield url


@pytest.mark.skipif(not LAMBADA.exists(), reason="../shared/data/lambada is not there")
def test_last_words_are_as_likely_as_in_transformers(url: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(LAMBADA.read_text(encoding="utf-8").splitlines(keepends=True)[:LINES]), encoding="utf-8")
    model = str(ROOT / "cellar" / "demo" / "story-11m")
    printed = run_program("lm-eval", "lm_eval_client.py", tmp_path, url, model, str(lines))
    answers = json.loads(printed.splitlines()[-1])
    for answer in answers.values():
        (ours, figures), (theirs, wanted) = answer["http"], answer["transformers"]
        assert len(ours) == LINES
        np.testing.assert_allclose(ours, theirs, atol=1e-3)  # nats; 2.2e-5 was the most of 500 lines
        assert figures["accuracy"] == wanted["accuracy"]
        assert figures["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
    # The two ways differ: the server's ids begin with a special token, as those of `add_bos_token` do.
    assert answers["bare"]["http"][0] != pytest.approx(answers["begun"]["http"][0], abs=0.1)
