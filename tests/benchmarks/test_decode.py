from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode
from benchmarks.marks import Line, Mark, lines
from cellar import demo
from cellar.models.registry import open_model, shipped_config
from cellar.models.sharding import shard
from cellar.schedule.steps.scheduler import StepScheduler


def test_prints_and_writes_one_figure_per_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode.seconds_per_step, "__defaults__", (1, 4))
    out = tmp_path / "out.json"
    arguments = ["--model", str(demo.path()), "--device", "cpu", "--dtype", "float32", "--max-model-len", "256"]
    decode.main([*arguments, "--shapes", "1x8,3x16", "--prompts", "20", "--offline", "3x9x4", "--json", str(out)])
    found = json.loads(out.read_text())
    assert list(found) == ["seconds to ready", "1x8", "3x16", "prompt 20", "offline 3x9x4"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompt 20"] > 0
    assert found["offline 3x9x4"] > 0


@pytest.mark.long
def test_a_prompt_is_followed_through_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(demo.path()), "--device", "cpu", "--dtype", "float32", "--max-model-len", "256"]
    before = StepScheduler.plan
    decode.main([*arguments, "--shapes", "", "--prompts", "", "--line", "20", "--tensor-parallel-size", "2"])
    said = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    found = [Line(int(process), float(begin), float(end), name) for begin, end, process, name in said]
    assert found == sorted(found, key=lambda line: line.begin)
    whole = found[0]
    assert (whole.process, whole.begin, whole.name) == (0, 0.0, "LLM.generate")
    assert {line.process for line in found if line.name == "StepScheduler.plan"} == {0}
    assert {line.process for line in found if line.name == "StepExecutor.launch"} == {1, 2}
    first = {name: next(line for line in found if line.name == name) for _, _, _, name in found}
    assert first["StepScheduler.plan"].end <= first["RankGroup.submit"].begin
    assert first["DeviceRows.apply"].begin >= first["StepExecutor.launch"].begin
    assert StepScheduler.plan is before


def test_only_what_most_prompts_have_is_told_and_the_first_of_a_name_is_apart_from_the_second() -> None:
    marks = [
        Mark(7, 1_000_000, 9_000_000, "whole"),
        Mark(5, 2_000_000, 3_000_000, "read"),
        Mark(7, 4_000_000, 6_000_000, "read"),
        Mark(7, 7_000_000, 7_500_000, "read"),
        Mark(7, 20_000_000, 30_000_000, "whole"),
        Mark(7, 25_000_000, 26_000_000, "read"),
        Mark(5, 22_000_000, 25_000_000, "read"),
        Mark(5, 35_000_000, 36_000_000, "read"),
    ]
    assert lines(marks[::-1], "whole", 5) == [
        Line(0, 0.0, 9.0, "whole"),
        Line(1, 1.5, 3.5, "read"),
        Line(0, 4.0, 5.5, "read"),
    ]


def test_a_rank_of_two_has_the_share_of_one_of_four() -> None:
    """Every matrix of every rank, but for the table of words, which each has whole."""
    raw = shipped_config("llama-3-70b")
    assert raw is not None
    whole, half = (open_model(one, "bfloat16", 32, 1024).spec for one in (raw, decode.cut(raw, 2)))
    for rank, other in ((0, 0), (1, 3)):
        mine, theirs = shard(half, rank, 2), shard(whole, other, 4)
        assert [(t.name, t.shape) for t in mine.layers[0].tensors] == [
            (t.name, t.shape) for t in theirs.layers[0].tensors
        ]
        assert [t.shape for t in mine.head] == [t.shape for t in theirs.head]
        assert mine.kv.chunk_nbytes() == theirs.kv.chunk_nbytes()


def test_what_cannot_be_cut_is_refused() -> None:
    raw = {"num_attention_heads": 6, "intermediate_size": 48, "vocab_size": 100, "hidden_size": 96}
    assert decode.cut(raw, 2)["num_key_value_heads"] == 3
    with pytest.raises(SystemExit, match="num_attention_heads 6 cannot be cut into 4 parts"):
        decode.cut(raw, 4)
    with pytest.raises(SystemExit, match="no intermediate_size"):
        decode.cut({"num_attention_heads": 6, "vocab_size": 100}, 2)
    with pytest.raises(SystemExit, match="2 ranks have no whole shares of 3"):
        decode.main(["--model", "llama-3-8b", "--shares-of", "3", "--tensor-parallel-size", "2"])
    with pytest.raises(SystemExit, match="no config that ships"):
        decode.main(["--model", "nobody/knows", "--shares-of", "4", "--tensor-parallel-size", "2"])
