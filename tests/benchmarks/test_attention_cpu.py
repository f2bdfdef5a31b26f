"""Rates of the CPU's attention: each way is measured, in the bytes of its format."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention_cpu


def test_every_format_has_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    attention_cpu.main(["--threads", "1", "--heads", "4x2", "--context", "70", "--megabytes", "1"])
    ((name, rates),) = json.loads(capsys.readouterr().out.splitlines()[-1]).items()
    assert name == "1 threads, 4x2"
    assert list(rates) == ["plain", "plain alone", "fp8", "fp8 alone", "int4", "int4 alone"]
    assert all(rate > 0 for rate in rates.values())
