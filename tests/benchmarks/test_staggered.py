"""Both schedules of a streamed model, measured: what is counted, and that all ages are there from the start."""

from __future__ import annotations

import json

import pytest

from benchmarks import staggered

SMALL = ["--device", "cpu", "--device-memory", "0.03", "--kv-cache-memory-bytes", "6000000", "--dtype", "float32"]
WORK = ["--max-num-seqs", "12", "--max-num-batched-tokens", "256", "--prompt", "16", "--generate", "64"]


def test_blocks_are_full_while_they_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    staggered.main([*SMALL, *WORK, "--passes", "12"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    zigzag, diagonal = found["zigzag"], found["diagonal"]
    assert diagonal["planned"] > zigzag["planned"]
    for block in (zigzag, diagonal):
        assert block["most"] == block["planned"]
        assert block["tokens"] >= 0.9 * block["planned"] * block["passes"], "who ends makes room for a new one"
        assert block["tokens_per_second"] == pytest.approx(block["tokens"] / block["seconds"])
    assert zigzag["tokens"] == zigzag["planned"] * zigzag["passes"]
    assert found["block_ratio"] == diagonal["planned"] / zigzag["planned"]


def test_a_diagonal_block_begins_with_sequences_of_all_ages() -> None:
    found = staggered.requests("diagonal", 8, 16, 64, 16)
    assert [len(request.prompt) for request in found] == [72, 64, 56, 48, 40, 32, 24, 16, *[16] * 4]
    assert [request.max_tokens for request in found] == [
        *range(8, 65, 8),
        *[64] * 4,
    ]
    assert {len(request.prompt) for request in staggered.requests("zigzag", 8, 16, 64, 16)} == {16 + 24}


def test_a_model_that_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="fits its device"):
        staggered.main(["--device", "cpu", "--device-memory", "4", *WORK, "--schedules", "zigzag"])
