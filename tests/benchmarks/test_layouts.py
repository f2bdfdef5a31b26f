from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layouts
from benchmarks.laid_steps import Shape
from tests.tiny_checkpoint import CONFIG

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
ONE_HEAD: dict[str, Any] = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"]}
ONE_HEAD |= {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}


def run(folder: Path, config: dict[str, Any], *arguments: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    out = folder / "out.json"
    common = ["--model", str(folder), "--ranks", "2", "--device", "cpu", "--machine", "4xh200", "--json", str(out)]
    layouts.main([*common, *arguments])
    found: dict[str, Any] = json.loads(out.read_text())
    assert not found["left_out"]
    return found


def test_layouts_are_measured_priced_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over two gloo ranks; every collective's bytes are the planner's."""
    found = run(tmp_path, SMALL | {"num_hidden_layers": 3}, "--layers", "2", "--tokens", "8,64")
    assert (found["layers"], found["of_layers"], found["machine"], found["device"]) == (2, 3, "2xH200", "cpu")
    rows = {(row["layout"], row["tokens"]): row for row in found["rows"]}
    names = ["1D heads", "2D heads", "XYZ batch"]
    assert list(rows) == [(name, tokens) for name in names for tokens in (8, 64)]
    for row in rows.values():
        assert row["sent"] == row["predicted_sent"] > 0
        assert 0 < row["predicted"] <= row["predicted_wall"]
        assert row["wall"] > 0
        assert row["whole"] > row["wall"]
        assert row["device"] is None
    assert [one["of"] for one in found["crossings"]] == [names[:2], names[::2], names[1:]]
    assert list(found["curves"]) == names
    said = capsys.readouterr().out
    assert all(said.count(f"\n{name} ") >= 2 for name in names)
    picture = tmp_path / "out.png"
    layouts.main(["--plot", str(tmp_path / "out.json"), "--output", str(picture)])
    assert picture.stat().st_size > 10_000


def test_by_batch_twice_as_much_context_fits_two_ranks(tmp_path: Path) -> None:
    """One head of K and V, which each rank has for itself where attention is cut by heads."""
    found = run(tmp_path, ONE_HEAD, "--heads-or-batch", "--contexts", "32,128", "--batch", "4")
    assert [(row["layout"], row["context"], row["new"]) for row in found["rows"]] == [
        (name, context, 1) for name in ("1D heads", "1D batch") for context in (32, 128)
    ]
    assert all(row["sent"] == row["predicted_sent"] for row in found["rows"])
    heads, batch = found["fits"]
    assert heads["token_nbytes"] == batch["token_nbytes"]
    assert batch["predicted_tokens"] == pytest.approx(2 * heads["predicted_tokens"], rel=1e-6)
    assert batch["tokens"] > 1.5 * heads["tokens"]  # of a host that others use, too
    assert batch["sequences"]["128"] == batch["tokens"] // 128


def test_a_step_has_a_prompt_for_each_rank() -> None:
    assert layouts.prompts(64, 4) == Shape(4, 16, 16)
    assert layouts.prompts(4096, 4) == Shape(4, 1024, 1024)
    assert layouts.prompts(16384, 4) == Shape(8, 2048, 2048)
    assert layouts.prompts(1, 4) == Shape(4, 1, 1)
    assert not layouts.prompts(1, 4).decodes


def test_four_ranks_have_four_layouts() -> None:
    found = layouts.all_layouts(4, 8, "heads")
    assert list(found) == ["1D heads", "2D heads", "X heads", "XYZ batch"]
    assert [layout.mesh.x for layout in found.values()] == [1, 2, 2, 2]


def test_curves_cross_between_points() -> None:
    slow, fast = [(1.0, 8.0), (4.0, 8.0), (16.0, 8.0)], [(1.0, 2.0), (4.0, 4.0), (16.0, 64.0)]
    assert layouts.crossed(slow, fast) == [pytest.approx(4 * 4 ** (1 / 4))]
    assert layouts.crossed(slow, slow[:2]) == []
    assert math.isclose(layouts.crossed(fast, slow)[0], layouts.crossed(slow, fast)[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "qwen3-14b", "--ranks", "5", "--device", "cpu"], "5 ranks are no box of two along x"),
        (["--ranks", "1", "--device", "cpu"], "1 ranks are not 2"),
        (["--heads-or-batch", "--model", "starcoder", "--batch", "6", "--device", "cpu"], "batch is 6; it must be a"),
    ],
)
def test_what_does_not_run_is_said(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        layouts.main(arguments)
