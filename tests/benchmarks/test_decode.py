from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode
from cellar import demo
from cellar.models.registry import open_model, shipped_config
from cellar.models.sharding import shard


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
