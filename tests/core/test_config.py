from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar.core.config import EngineConfig, ModelConfig
from cellar.core.errors import ConfigError
from tests.limits import run_python


def test_flat_options_find_their_part() -> None:
    config = EngineConfig.of(dtype="bf16", max_num_seqs=4, block_size=16, device="cpu")
    assert config.model.dtype == "bfloat16"
    assert config.schedule.max_num_seqs == 4
    assert config.cache.block_size == 16
    assert config.device.device == "cpu"


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineConfig.of(max_num_seq=4)
    with pytest.raises(ConfigError, match="known options: model"):
        EngineConfig.of(zzz=4)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": 5},
        {"model": 5},
        {"max_model_len": 0},
        {"max_model_len": 1},
        {"max_model_len": 1.5},
        {"max_model_len": "64"},
        {"skip_tokenizer_init": "no"},
        {"seed": None},
        {"load_format": "pickle"},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.1},
        {"gpu_memory_utilization": "most"},
        {"kv_cache_memory_bytes": 0},
        {"kv_cache_memory_bytes": 1e9},
        {"block_size": 24},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"enable_prefix_caching": "no"},
        {"max_num_batched_tokens": 0},
        {"scheduling_policy": "lifo"},
        {"decode_reserve": 1.0},
        {"run_ahead": 0},
        {"device": "tpu"},
        {"device": "cpu:1"},
        {"device": 0},
        {"num_threads": 0},
    ],
)
def test_a_bad_value_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**options)
    assert next(iter(options)) in str(caught.value)


def test_paths_numpy_numbers_and_dtypes_of_torch_are_taken() -> None:
    class Dtype:
        def __repr__(self) -> str:
            return "torch.bfloat16"

    config = EngineConfig.of(
        model=Path("a/b"), tokenizer=Path("c"), dtype=Dtype(), max_model_len=np.int64(64), decode_reserve=0
    )
    assert (config.model.model, config.model.tokenizer, config.model.dtype) == ("a/b", "c", "bfloat16")
    assert config.model.max_model_len == 64


def test_resolve_returns_a_new_one() -> None:
    config = EngineConfig()
    resolved = config.resolve(dtype="float32", max_model_len=128, device="cpu")
    assert config.model.dtype == "auto"
    assert (resolved.model.dtype, resolved.model.max_model_len, resolved.device.device) == ("float32", 128, "cpu")
    assert ModelConfig() == config.model


def test_fewer_than_forty_options() -> None:
    config = EngineConfig()
    parts = (config.model, config.cache, config.schedule, config.device)
    assert sum(len(part.__dataclass_fields__) for part in parts) < 40


def test_core_needs_no_torch() -> None:
    code = (
        "import sys, cellar.core.config, cellar.core.messages, cellar.core.hardware, cellar.core.specs\n"
        "assert 'torch' not in sys.modules"
    )
    run_python(code)
