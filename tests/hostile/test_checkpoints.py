"""Checkpoints that were made to hurt: one sentence each, before memory or time is lost."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar import LLM
from cellar.core.errors import CheckpointError
from cellar.models.checkpoint import Checkpoint
from cellar.models.registry import open_model, read_config
from cellar.text.tokenizer import Tokenizer
from tests.tiny_checkpoint import TOKENIZER, write_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 2**63, "from 1 to 4096"),
        ("num_hidden_layers", 10**9, "from 1 to 4096"),
        ("hidden_size", 2**62, "hidden_size in config.json"),
        ("vocab_size", 2**40, "vocab_size in config.json"),
        ("max_position_embeddings", 10**30, "max_position_embeddings in config.json"),
        ("eos_token_id", [0, 2**31], "not among the 320 tokens"),
        ("eos_token_id", 320, "not among the 320 tokens"),
    ],
)
def test_numbers_out_of_range(field: str, value: Any, message: str) -> None:
    open_model(LLAMA, "float32")
    with pytest.raises(CheckpointError, match=message):
        open_model({**LLAMA, field: value}, "float32")


def test_an_end_symbol_that_only_the_tokenizer_knows_ends_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=300)
    generation = {"eos_token_id": [299, 2**31]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match="2147483648 is not among"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("ends", [[[2]], [{}], ["2", None], [[[[]]]]])
def test_end_symbols_that_are_no_ids(tmp_path: Path, ends: list[Any]) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(CheckpointError, match="must be a token id or a list of them"):
        open_model(read_config(tmp_path), "float32")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_deep_nesting(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text('{"a": ' + DEEP + "}")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_deep_nesting_beside_the_tokenizer(tmp_path: Path, file: str) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "t")
    (tmp_path / "t" / file).write_text('{"a": ' + DEEP + "}")
    with pytest.raises(CheckpointError):
        Tokenizer.load(tmp_path / "t")


@pytest.mark.parametrize("key", ["²", "٣", "1" * 400, "-1", ""])
def test_ids_of_added_tokens_that_are_none(tmp_path: Path, key: str) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {key: {"content": "<x>"}}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        Tokenizer.load(tmp_path / "t")


@pytest.mark.parametrize(
    "change", [{"bos_token": "\ud800"}, {"added_tokens_decoder": {"9": {"content": "\ud800"}}}], ids=["role", "listed"]
)
def test_special_tokens_that_are_no_text(tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=r"valid Unicode|added_tokens_decoder"):
        Tokenizer.load(tmp_path / "t")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b", "x" * 300 + ".safetensors", "a\0b", ""]
)
def test_an_index_that_points_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="of its own folder only"):
        Checkpoint(folder)


def _compressed(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            with new.open(entry.filename, "w") as to:
                if entry.filename.endswith("data.pkl"):
                    for _ in range(2**7):
                        to.write(b"\0" * 2**20)
                else:
                    to.write(old.read(entry))


def test_a_compressed_pickle_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "plain.bin")
    _compressed(tmp_path / "plain.bin", tmp_path / "pytorch_model.bin")
    (tmp_path / "plain.bin").unlink()
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="is compressed"):
            Checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": ["llama"]})),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        lambda folder: (folder / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}"),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"chat_template": {"default": 5}}'),
        lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ " + "(" * 10_000 + " }}"),
    ],
)
def test_damage_of_any_kind_is_a_sentence(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder))
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 1000
