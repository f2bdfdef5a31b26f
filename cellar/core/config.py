"""Options of an engine: a few small frozen dataclasses, named as vLLM names them.

Command-line options are generated from these fields; `metadata["help"]` is their help text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cellar.core.dtypes import dtype_name
from cellar.core.errors import ConfigError
from cellar.core.kv_formats import kv_cache_dtype

CHUNK_SIZES = (16, 32, 64)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and in what numeric form. `model` None is the model that ships with Cellar."""

    model: str | None = _option(None, "Directory in Hugging Face's layout, or a hub name; default: the demo model.")
    tokenizer: str | None = _option(None, "Directory of the tokenizer; default: the model's.")
    dtype: str = _option("auto", "auto, float32, bfloat16 or float16.")
    max_model_len: int | None = _option(None, "Longest prompt plus output, in tokens; default: the model's.")
    quantization: Literal["int4", "int8", "fp8", "w8a8"] | None = _option(
        None, "Quantize a plain checkpoint while loading: int4 (groups of 64), int8, fp8; w8a8: activations, too (CPU)."
    )
    load_format: Literal["auto", "dummy"] = _option("auto", "auto reads weights; dummy makes random ones.")
    skip_tokenizer_init: bool = _option(False, "Token ids in and out only.")
    seed: int = _option(0, "Seed of requests that have none, and of dummy weights.")
    plan: str | None = _option(None, "Plan that `cellar plan --output` wrote; what it says is obeyed.")
    generation_config: str = _option(
        "auto", "Sampling defaults: auto takes the model's generation_config.json, vllm none, a folder its own."
    )

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "plan", "generation_config"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", dtype_name(str(self.dtype)))
        _check_types(self)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it must be at least 2, one token in and one token out."
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much memory the KV cache gets and how it is cut."""

    gpu_memory_utilization: float = _option(0.9, "Share of device memory that weights, KV and buffers may take.")
    kv_cache_memory_bytes: int | None = _option(None, "Bytes of KV cache; overrides gpu_memory_utilization.")
    block_size: int = _option(32, "Tokens per chunk: 16, 32 or 64.")
    kv_cache_dtype: str = _option("auto", "K and V in fewer bits: fp8 (e4m3) or int4; auto keeps the model's dtype.")
    enable_prefix_caching: bool = _option(True, "Share the KV of equal prefixes and keep it for later requests.")
    kv_offloading_size: float | None = _option(None, "GiB of host memory for KV that the device has no room for.")
    kv_eviction_policy: Literal["value", "chance", "lru"] | None = _option(
        None,
        "What KV goes first: value (cost / idle time), chance (cost x learned chance of a next turn) or lru; default: "
        "value with tiers, else lru.",
    )

    kv_disk_path: str | None = _option(None, "Directory for KV that survives a restart; one engine uses it at a time.")
    kv_disk_size: float | None = _option(None, "GiB of disk that it may take, KV of other models included.")

    kv_remote: str | None = _option(
        None, "Redis server for KV that other machines find, too: redis://, rediss:// or unix:// URL."
    )
    kv_remote_size: float | None = _option(None, "GiB that this engine may keep there.")
    kv_remote_ttl: float = _option(86400.0, "Seconds after which KV there that nobody uses is gone.")
    kv_remote_key_file: str | None = _option(
        None, "File with the key that seals KV there, the same for all who share it; or CELLAR_KV_REMOTE_KEY is set."
    )

    def __post_init__(self) -> None:
        for name in ("kv_disk_path", "kv_remote_key_file"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        _check_types(self)
        object.__setattr__(self, "kv_cache_dtype", kv_cache_dtype(self.kv_cache_dtype))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1].")
        if self.block_size not in CHUNK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}; it must be one of 16, 32, 64.")
        if self.kv_eviction_policy is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_eviction_policy chooses what is kept for later requests, but enable_prefix_caching is off; drop "
                "one of them."
            )
        for name in ("kv_offloading_size", "kv_disk_size", "kv_remote_size"):
            size = getattr(self, name)
            if size is not None and not 0 < size < float("inf"):
                raise ConfigError(f"{name} is {size}; it must be positive, in GiB.")
            if size is not None and not self.enable_prefix_caching:
                raise ConfigError(
                    f"{name} keeps KV for later requests, but enable_prefix_caching is off; drop one of them."
                )
        if (self.kv_disk_path is None) != (self.kv_disk_size is None):
            raise ConfigError("kv_disk_path and kv_disk_size go together: give both, or neither.")
        if (self.kv_remote is None) != (self.kv_remote_size is None):
            raise ConfigError("kv_remote and kv_remote_size go together: give both, or neither.")
        if not 1 <= self.kv_remote_ttl <= 10 * 365 * 86400:
            raise ConfigError(f"kv_remote_ttl is {self.kv_remote_ttl}; it must be in seconds, from 1 to ten years.")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How requests are batched (Pensieve §3.4.2, §3.4.3.5).

    No `max_num_batched_tokens`: as many as there are. No `max_mixed_seconds`: long prompts take what is left of a step.
    """

    max_num_seqs: int = _option(256, "Most requests that run at once.")
    max_num_batched_tokens: int | None = _option(None, "Most tokens computed in one step; default: 8192, CPU 2048.")
    max_mixed_seconds: float | None = _option(
        None,
        "Seconds of a step in which others decode, for prompts of more than 256 tokens; inf: no limit; default: 0.1 "
        "in a server.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option("fcfs", "fcfs, or priority (lower value first).")
    decode_reserve: float = _option(
        0.1,
        "Share of chunks kept free for running decodes, at most one for each, when requests are admitted; none while "
        "all have room however long they get.",
    )
    run_ahead: int = _option(2, "Steps handed to the device before the first has finished.")
    mask_timeout: float = _option(
        5.0, "Seconds that late masks of a sequence's structured output may take in all, by themselves."
    )

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1.")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least 1.")
        if self.max_mixed_seconds is not None and not self.max_mixed_seconds > 0:
            raise ConfigError(f"max_mixed_seconds is {self.max_mixed_seconds}; it must be positive.")
        if not 0 <= self.decode_reserve < 1:
            raise ConfigError(f"decode_reserve is {self.decode_reserve}; it must be in [0, 1).")
        if self.run_ahead < 1:
            raise ConfigError(f"run_ahead is {self.run_ahead}; it must be at least 1.")
        if not 0 < self.mask_timeout < float("inf"):
            raise ConfigError(f"mask_timeout is {self.mask_timeout}; it must be a positive number of seconds.")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = _option("auto", "auto, cpu, cuda or cuda:N.")
    tensor_parallel_size: int = _option(1, "Ranks that share the model: one a GPU, or parts of the CPU.")
    pipeline_parallel_size: int = _option(
        1, "Stages that the layers are cut into, each of tensor_parallel_size ranks; batches pass them one by one."
    )
    num_threads: int | None = _option(
        None, "Threads of the CPU runtime; default: as measured while it runs, at most all cores."
    )
    enforce_eager: bool = _option(False, "Launch every kernel of a decode step by itself: no CUDA graphs.")
    machine_profile: str = _option("auto", "Profile that chooses kernels: auto, none, a file, or a shipped one's name.")

    def __post_init__(self) -> None:
        _check_types(self)
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
            raise ConfigError(f"device {self.device!r} is not known; use auto, cpu, cuda or cuda:N.")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size is {self.tensor_parallel_size}; it must be at least 1.")
        if self.pipeline_parallel_size < 1:
            raise ConfigError(f"pipeline_parallel_size is {self.pipeline_parallel_size}; it must be at least 1.")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads is {self.num_threads}; it must be at least 1.")

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What a model that is larger than its device may take elsewhere."""

    device_memory: float | None = _option(
        None, "GiB that the device may hold; a model that does not fit lies in host memory and on disk, too."
    )
    host_memory: float | None = _option(
        None, "GiB of host memory for weights beside device_memory; default: as needed."
    )
    disk: float | None = _option(None, "GiB of disk for weights that neither holds; default: none.")
    disk_path: str | None = _option(None, "Directory for weights on disk; default: that of temporary files.")
    latency: float | None = _option(
        None, "Seconds that a request of max_model_len tokens may take; fewer run at once if need be."
    )
    schedule: Literal["zigzag", "diagonal"] = _option(
        "zigzag",
        "Sequences of a streamed model begin together (zigzag), or evenly spread so that more fit (diagonal): for long "
        "outputs of many requests.",
    )
    sparse_v: float | None = _option(
        None, "Share of values, those of the largest scores, that attention on the CPU reads; default: all."
    )

    def __post_init__(self) -> None:
        for name in ("disk_path",):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        _check_types(self)
        for name in ("device_memory", "host_memory", "disk"):
            size = getattr(self, name)
            if size is not None and not 0 <= size < float("inf"):
                raise ConfigError(f"{name} is {size}; it must be a number of GiB, 0 or more.")
        if self.nbytes["device"] == 0:
            raise ConfigError("device_memory is 0, but the device must hold a layer at least; give it more GiB.")
        if self.device_memory is None and (self.host_memory is not None or self.disk is not None):
            raise ConfigError(
                "host_memory and disk are for what device_memory does not hold, but that is not given; give it, in GiB."
            )
        if self.sparse_v is not None and not 0 < self.sparse_v < 1:
            raise ConfigError(
                f"sparse_v is {self.sparse_v:g}; it must be a share between 0 and 1; leave it out to read all."
            )
        if self.latency is not None and not 0 < self.latency < float("inf"):
            raise ConfigError(f"latency is {self.latency:g}; it must be a positive number of seconds.")
        if self.latency is not None and self.device_memory is None:
            raise ConfigError(
                "latency bounds the plan that is made for device_memory, but that is not given; give it, in GiB."
            )
        if self.schedule != "zigzag" and self.device_memory is None:
            raise ConfigError(
                f"schedule {self.schedule} is of models that device_memory does not hold, but that is not given; give "
                "it, in GiB."
            )

    @property
    def nbytes(self) -> dict[str, int | None]:
        """Bytes that each place may hold; None where nothing was said."""
        sizes = {"device": self.device_memory, "host": self.host_memory, "disk": self.disk}
        return {place: None if size is None else int(size * 2**30) for place, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Sort flat options (`dtype=..., max_num_seqs=...`) into their parts.

        Raises ConfigError, naming the nearest known option, for a name that no part has.
        """
        parts = {name: dict[str, Any]() for name in _PARTS}
        for name, value in options.items():
            for part, kind in _PARTS.items():
                if name in kind.__dataclass_fields__:
                    parts[part][name] = value
                    break
            else:
                raise ConfigError(_unknown(name))
        return cls(**{part: kind(**parts[part]) for part, kind in _PARTS.items()})

    def on(self, kind: str) -> EngineConfig:
        """A copy in which what depends on the kind of device is decided."""
        if self.schedule.max_num_batched_tokens is not None:
            return self
        return replace(self, schedule=replace(self.schedule, max_num_batched_tokens=step_tokens(kind)))

    @property
    def steps_ahead(self) -> int:
        """Plans that are on their way at once: `run_ahead`, and one more for each further pipeline stage."""
        return self.schedule.run_ahead + self.device.pipeline_parallel_size - 1

    def serving(self) -> EngineConfig:
        """A copy for a server, where somebody waits for each token: long prompts have a share of steps by default."""
        if self.schedule.max_mixed_seconds is not None:
            return self
        return replace(self, schedule=replace(self.schedule, max_mixed_seconds=MIXED_SECONDS))

    def resolve(self, *, dtype: str, max_model_len: int, device: str) -> EngineConfig:
        """A copy in which everything that said `auto` or None is decided."""
        return replace(
            self,
            model=replace(self.model, dtype=dtype, max_model_len=max_model_len),
            device=replace(self.device, device=device),
        )


MIXED_SECONDS = 0.1
"""What a token of one client's answer waits for another's long prompt."""


def step_tokens(kind: str) -> int:
    """Most tokens of a step on a kind of device. On the CPU a larger step leaves the cache and gains nothing."""
    return 2048 if kind == "cpu" else 8192


_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": ScheduleConfig,
    "device": DeviceConfig,
    "offload": OffloadConfig,
}


def _check_types(part: Any) -> None:
    """Raise ConfigError unless every option is of its type."""
    for name, kind in get_type_hints(type(part)).items():
        value, kinds = getattr(part, name), get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        if not any(_is_of(value, one) for one in kinds):
            raise ConfigError(
                f"{name} is {value!r}; it must be {' or '.join(_WORDS.get(k) or _listed(k) for k in kinds)}."
            )


_WORDS: dict[Any, str] = {
    str: "a string",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    NoneType: "None",
}


def _is_of(value: object, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in _WORDS else value in get_args(kind)


def _listed(literal: Any) -> str:
    return " or ".join(get_args(literal))


def _unknown(name: str) -> str:
    import difflib

    known = [option for kind in _PARTS.values() for option in kind.__dataclass_fields__]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}."
    return f"option {name!r} is not known; {hint}"
