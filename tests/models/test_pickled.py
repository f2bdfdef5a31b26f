"""Checkpoints of torch.save: what is read equals what was stored; what is no plain tensor is refused and not run."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cellar import LLM, SamplingParams
from cellar.core.errors import CheckpointError
from cellar.models import pickled
from cellar.models.checkpoint import Checkpoint
from cellar.models.loader import load
from cellar.runtime.probes.scores import weights_digest
from tests.conformance.chatglm import config_of
from tests.limits import run_python
from tests.models.test_loader import LLAMA, MEASURE, OPT, spec_of, stored_tensors
from tests.tiny_checkpoint import write_checkpoint

CHATGLM = config_of(4, 2, 8, 32)


def write(directory: Path, tensors: dict[str, Tensor], files: int = 1) -> None:
    if files == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    places = {name: f"pytorch_model-{i % files + 1:05d}-of-{files:05d}.bin" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        torch.save({name: t for name, t in tensors.items() if places[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("config", [LLAMA, OPT, CHATGLM], ids=["llama", "opt", "chatglm"])
def test_what_is_read_is_what_was_stored(config: dict[str, Any], files: int, tmp_path: Path) -> None:
    spec = spec_of(config)
    stored = stored_tensors(spec)
    leftovers = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)} if config is CHATGLM else {}
    write(tmp_path, stored | leftovers, files)
    weights = load(spec, tmp_path)
    safe = tmp_path / "safe"
    safe.mkdir()
    from safetensors.torch import save_file

    save_file(stored, safe / "model.safetensors")
    theirs = load(spec, safe)
    for ours, other in zip(
        (weights.embedding, *weights.layers, weights.head), (theirs.embedding, *theirs.layers, theirs.head), strict=True
    ):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[name], other[name]) for name in ours)


def test_every_form_of_a_plain_tensor(tmp_path: Path) -> None:
    """Views, parameters, tensors that share their memory as tied ones do, and other element types."""
    spec = spec_of(LLAMA | {"tie_word_embeddings": True}, "bfloat16")
    stored = stored_tensors(spec, torch.float16)
    name = "model.layers.1.mlp.down_proj.weight"
    forms: dict[str, Any] = OrderedDict(stored)
    forms["lm_head.weight"] = forms["model.embed_tokens.weight"]
    forms[name] = torch.nn.Parameter(stored[name].T.contiguous().T)
    assert not forms[name].is_contiguous()
    write(tmp_path, forms)
    weights = load(spec, tmp_path)
    assert torch.equal(weights.layers[1]["down"], stored[name].bfloat16())
    assert torch.equal(weights.embedding["embed"], stored["model.embed_tokens.weight"].bfloat16())
    assert Checkpoint(tmp_path).tensors[name].dtype == "F16"


@pytest.mark.parametrize("window", [1, 2000, 2**30])
def test_blocks_and_maps_of_any_size(window: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The map is let go and taken anew between blocks, and between files."""
    spec = spec_of(LLAMA)
    stored = stored_tensors(spec)
    write(tmp_path, stored, 2)
    monkeypatch.setattr("cellar.models.checkpoint.WINDOW", 300)
    monkeypatch.setattr(pickled, "WINDOW", window)
    opened: list[Path] = []

    def counted(file: Path, read: Callable[[Path], dict[str, Tensor]] = pickled.read_pickled) -> dict[str, Tensor]:
        opened.append(file)
        return read(file)

    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(pickled, "read_pickled", counted)
    for name, tensor in stored.items():
        assert torch.equal(torch.cat([block.clone() for _, block in checkpoint.read(name)]), tensor)
    assert len(set(opened)) == 2
    assert (len(opened) > 4 * len(stored)) == (window == 1)


def test_safetensors_come_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert all(tensor.file.suffix == ".safetensors" for tensor in Checkpoint(tmp_path).tensors.values())


def test_a_model_runs_from_such_a_file(tmp_path: Path) -> None:
    one, two = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "two")
    from safetensors.torch import load_file

    torch.save(load_file(two / "model.safetensors"), two / "pytorch_model.bin")
    (two / "model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    said = []
    for directory in (one, two):
        with LLM(directory, device="cpu", num_threads=1, kv_cache_memory_bytes=2**20, max_num_seqs=2) as llm:
            said.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert said[0] == said[1]
    assert weights_digest(one) != weights_digest(two) != weights_digest(tmp_path)


class Command:
    """What unpickles as a call of os.mkdir."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def code(file: Path) -> None:
    torch.save({"w": torch.zeros(3), "x": Command(file.parent / "made")}, file)


def legacy(file: Path) -> None:
    torch.save({"w": torch.zeros(3)}, file, _use_new_zipfile_serialization=False)


def cut(file: Path) -> None:
    torch.save({"w": torch.zeros(3000)}, file)
    os.truncate(file, file.stat().st_size - 300)


def saved(value: Any) -> Callable[[Path], None]:
    return lambda file: torch.save(value, file)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (code, "holds posix.mkdir, but only plain tensors"),
        (saved({"w": torch.nn.Linear(2, 2)}), "holds torch.nn.modules.linear.Linear, but only"),
        (saved({"state_dict": {"w": torch.zeros(3)}}), "holds a dict under 'state_dict'"),
        (saved({"w": torch.zeros(3), "epoch": 3}), "holds a int under 'epoch'"),
        (saved({3: torch.zeros(3)}), "holds a Tensor under '3'"),
        (saved({"w": torch.zeros(3).to_sparse()}), "holds a Tensor under 'w'"),
        (saved([torch.zeros(3)]), "holds a list, but"),
        (legacy, "truncated, damaged, or was saved by torch before 1.6"),
        (cut, "truncated, damaged"),
        (Path.touch, "truncated, damaged"),
    ],
    ids=["code", "module", "nested", "number", "key", "sparse", "list", "legacy", "cut", "empty"],
)
def test_what_is_not_plain_tensors_is_refused_with_one_sentence(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message) as caught:
        load(spec_of(LLAMA), tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]


def test_files_without_their_index(tmp_path: Path) -> None:
    write(tmp_path, stored_tensors(spec_of(LLAMA)), 2)
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks pytorch_model-00001-of-00002\.bin, which pytorch_model\.b"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"has \.bin files, but neither pytorch_model\.bin nor"):
        Checkpoint(tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_is_the_weights_the_largest_layer_and_400_mb(tmp_path: Path) -> None:
    config = LLAMA | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(config, "bfloat16")
    write(tmp_path, {name: tensor.zero_() for name, tensor in stored_tensors(spec).items()}, 2)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.bin")) > 1e9
    peak, weights, layer = map(int, run_python(MEASURE, str(tmp_path), "bfloat16").split())
    assert peak < weights + layer + 400e6
