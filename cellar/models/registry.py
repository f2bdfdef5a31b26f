"""From a config.json to a model: which file knows which model_type, and which configs ship with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch

from cellar.core.dtypes import dtype_name
from cellar.core.errors import CheckpointError, ConfigError
from cellar.core.specs import ModelSpec
from cellar.models import chatglm, cohere, falcon, gpt_bigcode, llama, mistral, opt, qwen2, qwen3
from cellar.models.model import Model
from cellar.models.quantization import quantized_on_loading, with_scheme
from cellar.quant.config import read_scheme

Config = Mapping[str, Any]


class ModelModule(Protocol):
    """What a model file exports."""

    ARCHITECTURE: str

    def spec(self, config: Config, dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
        """Everything static about the model that a config.json defines."""

    def model(self, spec: ModelSpec) -> Model:
        """The forward of a spec that this file made."""


MODELS: dict[str, ModelModule] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "opt": opt,
    "chatglm": chatglm,
    "falcon": falcon,
    "cohere": cohere,
    "gpt_bigcode": gpt_bigcode,
}


# Where a config says how its weights are quantized; the second name is that of older tools.
_QUANTIZED = ("quantization_config", "compression_config")


def open_model(
    config: Config,
    dtype: str,
    chunk_size: int = 32,
    max_model_len: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Model:
    """The model that a config.json defines, to run in `dtype` with at most `max_model_len` tokens (default: its own).

    `quantization`: int4, int8, fp8 or w8a8, to which a plain checkpoint's matrices are quantized when they are loaded.
    `kv_cache_dtype`: fp8 or int4, in which K and V are kept; auto: in `dtype`.
    Raises CheckpointError for what is not supported, ConfigError for a `max_model_len` that the model does not allow,
    or a checkpoint that is quantized already.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        names = config.get("architectures")
        of = f" ({', '.join(map(str, names))})" if isinstance(names, list) and names else ""
        raise CheckpointError(f"model_type {kind!r}{of} is not supported; supported are {', '.join(MODELS)}.")
    module = MODELS[kind]
    plain = {name: value for name, value in config.items() if name not in _QUANTIZED}
    spec = module.spec(plain, dtype_name(dtype), chunk_size, max_model_len)
    beyond = [end for end in spec.eos_token_ids if end >= spec.vocab_size]
    if beyond:
        raise CheckpointError(
            f"eos_token_id {beyond[0]} is not among the {spec.vocab_size} tokens of the vocabulary; "
            "correct config.json, or generation_config.json if it stands there."
        )
    return module.model(_in_formats(with_kv_dtype(spec, kv_cache_dtype), config, quantization))


def with_kv_dtype(spec: ModelSpec, kv_cache_dtype: str) -> ModelSpec:
    """The spec with K and V kept in fp8 or int4; unchanged for auto. Raises ConfigError for heads it does not suit."""
    if kv_cache_dtype == "auto":
        return spec
    groups = tuple(replace(group, dtype=kv_cache_dtype) for group in spec.kv.groups)
    for group in groups:
        group.row_nbytes  # noqa: B018  raises for heads that cannot be packed
    return replace(spec, kv=replace(spec.kv, groups=groups))


def _in_formats(spec: ModelSpec, config: Config, quantization: str | None) -> ModelSpec:
    """The spec with the formats that the checkpoint has, or the option wants."""
    both = [config[name] for name in _QUANTIZED if config.get(name) is not None]
    stored = both[0] if both else None
    if any(other != stored for other in both):
        raise CheckpointError(
            f"config.json has {' and '.join(_QUANTIZED)}, which say different things; remove the one that is wrong."
        )
    if stored is None:
        return spec if quantization is None else quantized_on_loading(spec, quantization)
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"quantization_config in config.json is {stored!r}; it must be an object.")
    scheme = read_scheme(stored)
    if quantization is not None:
        raise ConfigError(
            f"quantization is {quantization}, but the checkpoint is quantized already ({scheme.method}); leave the "
            "option out."
        )
    return with_scheme(spec, scheme)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory (or that file). End symbols that only generation_config.json names are added.

    Raises CheckpointError if there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    generation = file.with_name("generation_config.json")
    if generation.is_file():
        # Instruct checkpoints name the end of a turn there only; an answer would run on past it.
        ends = _listed(config.get("eos_token_id")) + _listed(_read_json(generation).get("eos_token_id"))
        if ends:
            # What is no id is refused where it is read.
            plain = all(isinstance(end, int) for end in ends)
            config["eos_token_id"] = list(dict.fromkeys(ends)) if plain else ends
    return config


def shipped_names() -> tuple[str, ...]:
    """Names of the models whose dimensions ship with the package."""
    folder = resources.files("cellar.models") / "configs"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def shipped_config(name: str) -> dict[str, Any] | None:
    """The config.json of a well-known model, e.g. `llama-3-8b` in any case; None if there is none of that name."""
    if name.lower() not in shipped_names():
        return None
    text = (resources.files("cellar.models") / "configs" / f"{name.lower()}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def auto_dtype(config: Config, device_kind: str, fast_bfloat16: bool | None = None) -> str:
    """The dtype of a run that says `auto`.

    On an accelerator it is the checkpoint's. On the CPU float16 becomes float32, and so does bfloat16 unless the
    processor multiplies it in hardware (AVX-512 BF16 or AMX), given by `fast_bfloat16` or asked of it; packed linear
    weights keep two bytes an element all the same. A config that names no dtype means float32.
    """
    stored = dtype_name(str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    if device_kind != "cpu" or stored == "float32":
        return stored
    if stored == "bfloat16" and (cpu_has_fast_bfloat16() if fast_bfloat16 is None else fast_bfloat16):
        return "bfloat16"
    return "float32"


def cpu_has_fast_bfloat16() -> bool:
    """True if this processor has instructions for products of bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _listed(ids: Any) -> list[Any]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); give a directory in Hugging Face's layout."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}); get it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object; get it again.")
    return value
