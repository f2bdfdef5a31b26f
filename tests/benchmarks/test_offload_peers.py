"""FlexGen and Accelerate beside Cellar: what they are asked for, and that Accelerate's side runs."""

from __future__ import annotations

import argparse
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import offload_peers

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


def test_flexgen_is_asked_for_what_the_options_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[argparse.Namespace] = []
    flex: Any = ModuleType("flexgen.flex_opt")

    def add_parser_arguments(parser: argparse.ArgumentParser) -> None:
        """Names and types of FlexGen 0.1.8."""
        for name in ("model", "path", "offload-dir", "log-file"):
            parser.add_argument(f"--{name}")
        for name in ("prompt-len", "gen-len", "gpu-batch-size", "num-gpu-batches"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--percent", nargs="+", type=int)
        for name in ("cpu-cache-compute", "compress-weight", "compress-cache"):
            parser.add_argument(f"--{name}", action="store_true")

    def run_flexgen(args: argparse.Namespace) -> None:
        asked.append(args)
        tokenizer = flex.AutoTokenizer.from_pretrained("facebook/opt-30b", padding_side="left")
        ids = tokenizer(["a text"], padding="max_length", max_length=args.prompt_len).input_ids
        assert [len(row) for row in ids] == [args.prompt_len]

    flex.add_parser_arguments, flex.run_flexgen = add_parser_arguments, run_flexgen
    flex.timers = lambda name: SimpleNamespace(costs=[2.0, 0.5, 0.25])
    monkeypatch.setitem(sys.modules, "flexgen", ModuleType("flexgen"))
    monkeypatch.setitem(sys.modules, "flexgen.flex_opt", flex)
    monkeypatch.setattr(offload_peers, "find_spec", lambda name: object())
    options = "flexgen opt-30b --device-memory 16 --batch 4 --batches 2 --prompt 9 --generate 3 --cpu-attention"
    assert offload_peers.main([*options.split(), "--percent", "20", "80", "0", "100", "0", "100"]) == 0
    (args,) = asked
    assert (args.model, args.path, args.prompt_len, args.gen_len) == ("facebook/opt-30b", "_DUMMY_", 9, 3)
    assert (args.gpu_batch_size, args.num_gpu_batches, args.percent) == (4, 2, [20, 80, 0, 100, 0, 100])
    assert (args.cpu_cache_compute, args.compress_weight, args.compress_cache) == (True, False, False)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens_per_second"] == pytest.approx(4 * 2 * 3 / 2.75)
    assert found["ms_per_token"] == pytest.approx(375.0)


def test_accelerate_runs_a_model_of_random_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate", reason="not installed")
    made: list[Any] = []
    filled = offload_peers.filled
    monkeypatch.setattr(offload_peers, "shipped_config", lambda name: TINY)
    monkeypatch.setattr(offload_peers, "filled", lambda model, places: (made.append(model), filled(model, places)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = "accelerate tiny --device-memory 1 --batch 2 --prompt 5 --generate 4 --dtype float32"
    assert offload_peers.main(options.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["first"] > 0
    assert found["tokens_per_second"] > 0
    (model,) = made
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("flexgen opt-30b --device-memory 16", "flexgen is not installed"),
        ("accelerate nobody --device-memory 6", "no shipped config 'nobody'"),
    ],
)
def test_what_is_not_there_is_said(
    options: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload_peers, "find_spec", lambda name: None if name == "flexgen" else object())
    assert offload_peers.main(options.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--generate 1", "--batches 2"])
def test_what_cannot_be_measured_is_refused(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offload_peers.parsed(f"accelerate llama-3-8b --device-memory 6 {more}".split())
    assert more.split()[0] in capsys.readouterr().err
