"""From options to a runtime: what is decided, what is loaded, and what is refused in one sentence."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cellar.core.config import EngineConfig
from cellar.core.errors import CapacityError, CheckpointError, ConfigError, DeviceError
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.device import resolve_device
from cellar.runtime.memory import human, resident
from cellar.runtime.steps.local import open_local
from tests.runtime.steps.steps import CONFIG, Step, greedy, prompt_of, run, tiny_model, tokens_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The tiny model as a checkpoint."""
    model, weights = tiny_model()
    stored: dict[str, torch.Tensor] = {}
    named = [(weights.embedding, model.spec.embedding), (weights.head, model.spec.head)]
    named += [(values, layer.tensors) for values, layer in zip(weights.layers, model.spec.layers, strict=True)]
    for values, specs in named:
        for spec in specs:
            parts = values[spec.name].split(spec.parts or spec.shape[0])
            stored |= {name: part.contiguous() for name, part in zip(spec.stored, parts, strict=True)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def config(**options: Any) -> EngineConfig:
    options = {"device": "cpu", "block_size": 16, "num_threads": 1, "kv_cache_memory_bytes": 2**22, **options}
    return EngineConfig.of(**options)


def test_memory_is_said_at_the_start_and_what_the_system_counts(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="cellar.runtime.steps.local"):
        opened = open_local(config(model=str(directory), load_format="dummy", kv_offloading_size=2**-9))
    memory, chunk = opened.memory, opened.spec.kv.chunk_nbytes()
    opened.runtime.close()
    assert memory.weights == opened.spec.nbytes()
    assert (memory.num_chunks, memory.kv) == (2**22 // chunk, 2**22 // chunk * chunk)
    assert memory.host_kv == 2**21 // chunk * chunk
    assert 0 <= memory.taken < 2**33
    (line,) = [record.getMessage() for record in caplog.records if "memory on" in record.getMessage()]
    assert line == memory.line()
    assert line.startswith(
        f"memory on cpu: weights {human(memory.weights)}, KV 4 MiB in {memory.num_chunks:,} chunks, "
    )
    assert "host KV 2 MiB; this process grew by " in line


def test_the_memory_of_this_process_is_the_systems_count() -> None:
    before = resident()
    with mmap.mmap(-1, 2**27) as held:  # an array might take over what others have freed
        held.write(bytes([1]) * 2**27)
        assert resident() - before > 0.5 * 2**27


def test_a_checkpoint_runs(directory: Path) -> None:
    opened = open_local(config(model=str(directory), max_num_seqs=5))
    model, weights = tiny_model()
    prompt = prompt_of(20)
    found = run(opened.runtime, Step(0).open(4).place(4, [0, 1]).prompt(4, prompt), Step(1).decode(4, 20))
    assert [token for result in found for token in tokens_of(result)] == greedy(model, weights, prompt, 2)
    capacity = opened.runtime.capacity
    assert (capacity.num_rows, capacity.chunk_size, capacity.max_model_len) == (5, 16, 128)
    assert capacity.num_slots == 2**22 // opened.spec.kv.chunk_nbytes()
    resolved = opened.config
    assert (resolved.model.dtype, resolved.model.max_model_len, resolved.device.device) == ("float32", 128, "cpu")
    assert opened.directory == directory
    executor = opened.runtime.executor
    assert executor is not None
    assert isinstance(executor.forward.weights.layers[0]["qkv"], LinearWeight)
    assert isinstance(executor.forward.weights.embedding["embed"], torch.Tensor)
    opened.runtime.close()


def test_dummy_weights_need_a_config_only(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 40}
    for opened in (open_local(config(model=str(directory), **options)), open_local(config(**options), directory)):
        result = run(opened.runtime, Step(0).open(0).place(0, [0]).prompt(0, prompt_of(9)))[0]
        assert len(tokens_of(result)) == 1
        assert opened.spec.dtype == "bfloat16"
        assert opened.runtime.capacity.max_model_len == 40
        opened.runtime.close()
    with pytest.raises(CheckpointError, match="no weights"):
        open_local(config(model=str(directory)))


def test_too_little_cache_says_what_would_fit(directory: Path) -> None:
    chunk = tiny_model()[0].spec.kv.chunk_nbytes()
    with pytest.raises(CapacityError, match="lower max_model_len to at most 48,"):
        open_local(config(model=str(directory), kv_cache_memory_bytes=3 * chunk))
    opened = open_local(config(model=str(directory), kv_cache_memory_bytes=3 * chunk, max_model_len=48))
    assert opened.runtime.capacity.num_slots == 3
    opened.runtime.close()


def test_too_little_memory_for_the_weights(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.runtime.steps.local.device_free", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"take .* KiB in float32, but cpu has 1000 B of memory free"):
        open_local(config(model=str(directory)))


def test_what_is_not_there_or_not_allowed(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor a hub name"):
        open_local(config(model="/no/such/place"))
    with pytest.raises(ConfigError, match="no model is given"):
        open_local(config())
    with pytest.raises(ConfigError, match="max_model_len is 4096"):
        open_local(config(model=str(directory), max_model_len=4096))


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(DeviceError, match="cuda:99 is not there, this machine has"):
        resolve_device("cuda:99")


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="only cuda:0 to cuda:1"):
        resolve_device("cuda:2")
