"""Loading: what is read equals what was stored; what is damaged is refused; memory stays within its bound."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.checkpoint import Checkpoint
from cellar.models.loader import dummy, load
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model, shipped_config
from tests.limits import run_python

ROOT = Path(__file__).parents[2]

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 24}
OPT = SIZES | {"model_type": "opt", "ffn_dim": 24, "max_position_embeddings": 20, "word_embed_proj_dim": 8}


def spec_of(config: dict[str, Any], dtype: str = "float32") -> ModelSpec:
    return open_model(config, dtype).spec


def stored_tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors under the names that a checkpoint of this model has."""
    torch.manual_seed(0)
    made: dict[str, Tensor] = {}
    for tensor in spec.tensors():
        parts = tensor.parts or (tensor.shape[0] // len(tensor.stored),) * len(tensor.stored)
        for name, rows in zip(tensor.stored, parts, strict=True):
            made[name] = torch.randn(rows, *tensor.shape[1:], dtype=dtype)
    return made


def write(directory: Path, tensors: dict[str, Tensor], files: int = 1) -> None:
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    places = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: t for name, t in tensors.items() if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("config", [LLAMA, OPT, LLAMA | {"tie_word_embeddings": True}], ids=["llama", "opt", "tied"])
def test_what_is_read_is_what_was_stored(config: dict[str, Any], files: int, tmp_path: Path) -> None:
    spec = spec_of(config)
    stored = stored_tensors(spec)
    write(tmp_path, stored, files)
    weights = load(spec, tmp_path)
    groups = [(spec.embedding, weights.embedding), (spec.head, weights.head)]
    groups += [(layer.tensors, weights.layers[layer.index]) for layer in spec.layers]
    for specs, tensors in groups:
        assert list(tensors) == [t.name for t in specs] or set(tensors) == {t.name for t in specs}
        for tensor in specs:
            assert torch.equal(tensors[tensor.name], torch.cat([stored[name] for name in tensor.stored]))
    assert (weights.head["lm_head"] is weights.embedding["embed"]) == spec.tied_head


@pytest.mark.parametrize("window", [1, 300, 1000])
def test_large_tensors_are_read_in_blocks(window: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows have 64 or 96 bytes here: blocks of one row, of some rows with a rest, and some tensors whole."""
    spec = spec_of(LLAMA)
    stored = stored_tensors(spec)
    write(tmp_path, stored)
    monkeypatch.setattr("cellar.models.checkpoint.WINDOW", window)
    weights = load(spec, tmp_path)
    assert torch.equal(weights.head["lm_head"], stored["lm_head.weight"])
    name = "model.layers.1.mlp.{}_proj.weight"
    assert torch.equal(weights.layers[1]["down"], stored[name.format("down")])
    assert torch.equal(weights.layers[1]["gate_up"], torch.cat([stored[name.format(p)] for p in ("gate", "up")]))
    assert max(len(block) for _, block in Checkpoint(tmp_path).read("lm_head.weight")) == max(1, window // 64)


def test_loaded_tensors_do_not_hold_the_file(tmp_path: Path) -> None:
    """Same dtype, no concatenation: still a copy, or the mapped file would stay in memory and could change under us."""
    spec = spec_of(LLAMA)
    stored = stored_tensors(spec)
    write(tmp_path, stored)
    weights = load(spec, tmp_path)
    write(tmp_path, {name: torch.zeros_like(t) for name, t in stored.items()})
    assert torch.equal(weights.head["lm_head"], stored["lm_head.weight"])


@pytest.mark.parametrize("there", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elements_are_converted_on_the_way(there: torch.dtype, tmp_path: Path) -> None:
    spec = spec_of(LLAMA, "bfloat16")
    stored = stored_tensors(spec, there)
    write(tmp_path, stored)
    weights = load(spec, tmp_path)
    assert torch.equal(weights.layers[1]["down"], stored["model.layers.1.mlp.down_proj.weight"].bfloat16())


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
def test_names_without_their_first_part(config: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(config)
    stored = stored_tensors(spec)
    write(tmp_path, {name.removeprefix("model."): tensor for name, tensor in stored.items()})
    weights = load(spec, tmp_path)
    assert torch.equal(weights.embedding["embed"], stored[spec.embedding[0].stored[0]])


def test_a_stored_matrix_may_be_transposed(tmp_path: Path) -> None:
    from dataclasses import replace

    spec = spec_of(LLAMA)
    turned = replace(spec.head[1], transposed=True)
    spec = replace(spec, head=(spec.head[0], turned))
    stored = stored_tensors(spec)
    write(tmp_path, stored | {"lm_head.weight": stored["lm_head.weight"].T.contiguous()})
    assert torch.equal(load(spec, tmp_path).head["lm_head"], stored["lm_head.weight"])


def test_a_tied_head_may_be_stored_if_it_is_equal_and_may_stand_for_the_embedding(tmp_path: Path) -> None:
    spec = spec_of(LLAMA | {"tie_word_embeddings": True})
    stored = stored_tensors(spec)
    embed = stored["model.embed_tokens.weight"]
    write(tmp_path, stored | {"lm_head.weight": embed.clone()})
    assert torch.equal(load(spec, tmp_path).head["lm_head"], embed)
    write(tmp_path, stored | {"lm_head.weight": embed + 1})
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        load(spec, tmp_path)
    del stored["model.embed_tokens.weight"]
    write(tmp_path, stored | {"lm_head.weight": embed})
    assert torch.equal(load(spec, tmp_path).embedding["embed"], embed)


def test_a_transform_sees_each_tensor_once_and_a_tied_head_twice(tmp_path: Path) -> None:
    spec = spec_of(LLAMA | {"tie_word_embeddings": True})
    write(tmp_path, stored_tensors(spec))
    seen: list[TensorSpec] = []

    def halve(tensor: TensorSpec, value: Tensor) -> Tensor:
        seen.append(tensor)
        return value.half() if is_linear(tensor) else value

    weights = load(spec, tmp_path, transform=halve)
    assert sorted(t.stored for t in seen) == sorted(t.stored for t in spec.tensors())
    assert weights.embedding["embed"].dtype == torch.float32
    assert weights.head["lm_head"].dtype == torch.float16
    packed = {name for name, t in weights.layers[0].items() if t.dtype == torch.float16}
    assert packed == {"qkv", "out", "gate_up", "down"}


def remove(name: str) -> Callable[[Path, dict[str, Tensor]], None]:
    def change(directory: Path, tensors: dict[str, Tensor]) -> None:
        write(directory, {n: t for n, t in tensors.items() if n != name})

    return change


def with_tensors(**changes: Tensor) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda directory, tensors: write(directory, tensors | {n.replace("__", "."): t for n, t in changes.items()})


def truncated(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors, 2)
    file = directory / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def cut_header(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors)
    os.truncate(directory / "model.safetensors", 5)


def file_gone(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors, 2)
    (directory / "model-00002-of-00002.safetensors").unlink()


def index_gone(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors, 2)
    (directory / "model.safetensors.index.json").unlink()


def index_wrong(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors, 2)
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["model.norm.weight"] = next(f for f in places.values() if f != places["model.norm.weight"])
    index.write_text(json.dumps({"weight_map": places}))


def index_damaged(directory: Path, tensors: dict[str, Tensor]) -> None:
    write(directory, tensors, 2)
    (directory / "model.safetensors.index.json").write_text('{"weight_map"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("lm_head.weight"), "has no tensor lm_head.weight"),
        (remove("model.layers.1.self_attn.k_proj.weight"), "has no tensor model.layers.1.self_attn.k_proj.weight"),
        (with_tensors(model__norm__weight=torch.zeros(15)), r"model.norm.weight .* shape \[15\], but .* \[16\]"),
        (with_tensors(model__embed_tokens__weight=torch.zeros(16, 37)), r"shape \[16, 37\]"),
        (with_tensors(lm_head__weight=torch.zeros(37, 16, dtype=torch.int8)), "stored as I8"),
        (with_tensors(model__layers__0__self_attn__q_norm__weight=torch.zeros(4)), "does not use, such as model"),
        (with_tensors(model__layers__2__mlp__up_proj__weight=torch.zeros(4)), "1 tensors .* does not use"),
        (truncated, "00002-of-00002.safetensors is truncated or damaged"),
        (cut_header, "model.safetensors is truncated or damaged"),
        (file_gone, "lacks model-00002-of-00002.safetensors"),
        (index_gone, "neither model.safetensors nor model.safetensors.index.json"),
        (index_wrong, "says that model.norm.weight is in"),
        (index_damaged, "index.json is damaged"),
        (lambda directory, tensors: None, "has no weights"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_one_sentence(
    change: Callable[[Path, dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    spec = spec_of(LLAMA)
    change(tmp_path, stored_tensors(spec))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(spec, tmp_path)
    assert "\n" not in str(caught.value)


def test_swapped_query_and_key_sizes_are_noticed(tmp_path: Path) -> None:
    """Their sum is right, so only the size of each part tells."""
    spec = spec_of(LLAMA)
    stored = stored_tensors(spec)
    name = "model.layers.0.self_attn.{}_proj.weight"
    stored[name.format("q")], stored[name.format("k")] = stored[name.format("k")], stored[name.format("q")]
    write(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight"):
        load(spec, tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    spec = spec_of(LLAMA)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(spec, tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(spec, tmp_path / "file")


def test_harmless_leftovers_of_old_checkpoints(tmp_path: Path) -> None:
    spec = spec_of(LLAMA)
    with_tensors(model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))(tmp_path, stored_tensors(spec))
    load(spec, tmp_path)
    opt = spec_of(OPT)
    with_tensors(model__decoder__version=torch.zeros(1))(tmp_path, stored_tensors(opt))
    load(opt, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dummy_weights_are_a_function_of_seed_and_name(dtype: str) -> None:
    spec = spec_of(LLAMA | {"tie_word_embeddings": True}, dtype)
    one, same, other = dummy(spec, seed=1), dummy(spec, seed=1), dummy(spec, seed=2)
    assert torch.equal(one.layers[1]["qkv"], same.layers[1]["qkv"])
    assert not torch.equal(one.layers[1]["qkv"], one.layers[0]["qkv"])
    assert not torch.equal(one.layers[1]["qkv"], other.layers[1]["qkv"])
    assert one.layers[0]["qkv"].dtype == getattr(torch, dtype)
    assert torch.equal(one.layers[0]["input_norm"].float(), torch.ones(16))
    assert one.head["lm_head"] is one.embedding["embed"]
    assert 0.5 < one.layers[0]["gate_up"].float().std() * 16**0.5 < 2


def test_activations_of_dummy_weights_stay_finite_in_half_precision() -> None:
    """A deep, narrow model of every family, as wide in proportion as real ones."""
    from tests.models.dense_context import logits_of

    for name in ("llama-3-8b", "qwen2.5-7b", "qwen3-8b", "opt-175b", "mistral-7b"):
        config = shipped_config(name)
        assert config is not None
        small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        small |= {"vocab_size": 101, "intermediate_size": 256, "ffn_dim": 256, "word_embed_proj_dim": 64}
        small |= {"eos_token_id": 2}
        model = open_model(config | small, "float16", max_model_len=64)
        logits = logits_of(model, dummy(model.spec), torch.arange(20), [20]).float()
        assert logits.isfinite().all()
        assert 0.1 < logits.std() < 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_loading_to_a_gpu(tmp_path: Path) -> None:
    spec = spec_of(LLAMA, "bfloat16")
    write(tmp_path, stored_tensors(spec))
    here, there = load(spec, tmp_path), load(spec, tmp_path, "cuda")
    assert there.layers[1]["qkv"].is_cuda
    assert torch.equal(here.layers[1]["qkv"], there.layers[1]["qkv"].cpu())
    made = dummy(spec, "cuda", seed=3).layers[0]["down"]
    assert made.is_cuda
    assert torch.equal(made, dummy(spec, "cuda", seed=3).layers[0]["down"])


MEASURE = """
import sys, torch
from pathlib import Path
from cellar.models.loader import load
from cellar.models.registry import open_model, read_config

torch.set_num_threads(1)
directory = Path(sys.argv[1])
spec = open_model(read_config(directory), sys.argv[2]).spec
weights = load(spec, directory, transform=lambda tensor, value: value.clone())
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, spec.nbytes(), max(layer.nbytes for layer in spec.layers))
"""


def write_hollow(directory: Path, config: dict[str, Any], files: int) -> int:
    """A float32 checkpoint that is a hole in the file system: nothing is written, but reading maps all its pages."""
    (directory / "config.json").write_text(json.dumps(config))
    spec = spec_of(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in spec.tensors():
        parts = tensor.parts or (tensor.shape[0] // len(tensor.stored),) * len(tensor.stored)
        shapes |= {name: (rows, *tensor.shape[1:]) for name, rows in zip(tensor.stored, parts, strict=True)}
    places = {name: f"model-{i * files // len(shapes) + 1}-of-{files}.safetensors" for i, name in enumerate(shapes)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file in set(places.values()):
        header, end = {}, 0
        for name in (n for n in shapes if places[n] == file):
            start, end = end, end + 4 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(directory / file, 8 + len(text) + end)
    return 4 * spec.num_parameters()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_the_largest_layer_and_400_mb(dtype: str, tmp_path: Path) -> None:
    config = LLAMA | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 1000}
    size = write_hollow(tmp_path, config, files=2)
    assert size > 390e6
    peak, weights, layer = map(int, run_python(MEASURE, str(tmp_path), dtype).split())
    assert weights == (size if dtype == "float32" else size // 2)
    assert peak < weights + layer + 400e6
