"""The comparison with llama.cpp: what is written for it is the model that Cellar has, and Cellar's own side runs."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import llama_cpp
from benchmarks.llama_cpp import Work, ours, tensors, write
from cellar import demo
from cellar.models.registry import open_model, shipped_config


def test_both_have_as_many_numbers() -> None:
    config = shipped_config("llama-3.2-1b")
    assert config is not None
    ours = [t for t in open_model(config, "bfloat16").spec.tensors() if t.name != "lm_head"]  # which is the embedding
    assert sum(prod(shape) for shape in tensors(config).values()) == sum(prod(t.shape) for t in ours)


def test_what_is_written_has_bytes_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}

    class Writer:
        def __init__(self, path: str, architecture: str) -> None:
            assert architecture == "llama"

        def add_tensor(self, name: str, numbers: Any, **_: Any) -> None:
            written[name] = numbers

        def __getattr__(self, name: str) -> Any:
            return lambda *values: written.update({name: values})

    kinds = SimpleNamespace(BF16="bf16", MOSTLY_BF16="bf16")
    gguf = SimpleNamespace(GGUFWriter=Writer, GGMLQuantizationType=kinds, LlamaFileType=kinds)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    config = {
        "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "vocab_size": 20, "num_hidden_layers": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    write(config, tmp_path / "m.gguf")
    shapes = tensors(config)
    assert len(shapes) == 2 + 2 * 9
    for name, shape in shapes.items():
        assert written[f"{name}.weight"].nbytes == prod(shape) * (4 if len(shape) == 1 else 2)
    assert written["add_head_count_kv"] == (1,)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_our_side_is_measured(quantization: str | None) -> None:
    step, prompt = ours(str(demo.path()), quantization, 1, [Work(2, 8, steps=2), Work(0, 16)])
    assert 0 < step < 10
    assert 0 < prompt < 10


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="llama_cpp and gguf cannot be imported"):
        llama_cpp.main([])
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="no shipped config of a Llama"):
        llama_cpp.main(["--model", "mistral-7b"])
