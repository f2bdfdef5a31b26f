"""Equal content has equal fingerprints, and no tensor may change unseen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cellar.core.errors import CheckpointError
from cellar.models import registry
from cellar.models.fingerprint import BLOCK, of_checkpoint, of_dummy


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    directory = tmp_path / "model"
    directory.mkdir()
    for part in range(2):
        tensors = {f"layer.{part}.{name}": torch.randn(shape) for name, shape in (("q", (300, 40)), ("norm", (7,)))}
        save_file(tensors, directory / f"model-{part}.safetensors")
    return directory


def test_a_copy_elsewhere_has_the_same_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not a weight")
    assert of_checkpoint(tmp_path / "copy") == of_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["layer.0.q", "layer.0.norm", "layer.1.q", "layer.1.norm"])
def test_a_change_of_any_tensor_is_seen(checkpoint: Path, name: str) -> None:
    before = of_checkpoint(checkpoint)
    file = checkpoint / f"model-{name[6]}.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, file)
    assert of_checkpoint(checkpoint) != before


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_one_element_in_a_block_is_seen(checkpoint: Path, where: str) -> None:
    before = of_checkpoint(checkpoint)
    file = checkpoint / "model-0.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    at = {"begin": begin, "middle": begin + 28 + 300 * 40 * 2, "end": len(data) - 1}[where]
    assert len(data) - begin > 3 * BLOCK
    data[at] ^= 1
    file.write_bytes(data)
    assert of_checkpoint(checkpoint) != before


def test_files_and_shapes_count(checkpoint: Path) -> None:
    before = of_checkpoint(checkpoint)
    (checkpoint / "model-1.safetensors").rename(checkpoint / "model-2.safetensors")
    renamed = of_checkpoint(checkpoint)
    tensors = load_file(checkpoint / "model-0.safetensors")
    save_file({name: t.reshape(-1, 1) for name, t in tensors.items()}, checkpoint / "model-0.safetensors")
    assert len({before, renamed, of_checkpoint(checkpoint)}) == 3


def test_pickled_files_have_one_too(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    torch.save({"a": torch.zeros(10_000)}, checkpoint / "pytorch_model.bin")
    before = of_checkpoint(checkpoint)
    torch.save({"a": torch.ones(10_000)}, checkpoint / "pytorch_model.bin")
    assert of_checkpoint(checkpoint) != before


def test_damage_is_one_sentence(checkpoint: Path) -> None:
    (checkpoint / "model-0.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="damaged"):
        of_checkpoint(checkpoint)


def test_dummy_weights_follow_from_seed_spec_and_device() -> None:
    config = registry.shipped_config("llama-2-7b")
    assert config is not None
    spec, other = (registry.open_model({**config, "num_hidden_layers": n}, "float32").spec for n in (2, 3))
    made = {of_dummy(spec, 0, "cpu"), of_dummy(spec, 1, "cpu"), of_dummy(other, 0, "cpu"), of_dummy(spec, 0, "cuda")}
    assert len(made) == 4
    assert of_dummy(spec, 0, "cpu") in made
