"""The kernel of few tokens beside what was there before it: all three are measured."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import linear_plain


def test_every_way_has_a_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_plain, "TOKENS", (1, 5))
    monkeypatch.setattr(linear_plain, "use_threads", lambda count: torch.get_num_threads())
    linear_plain.main(["--rows", "64", "--columns", "96", "--matrices", "2", "--threads", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["dtype"], one["tokens"]) for one in found] == [
        (f"torch.{name}", tokens) for name in ("float16", "bfloat16") for tokens in (1, 5)
    ]
    assert all(one[name] > 0 for one in found for name in ("kernel", "before", "packed"))
