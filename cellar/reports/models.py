"""Models by name, as specs: for `inspect`, `plan`, `profile`, `simulate` and benchmarks. No weight is read."""

from __future__ import annotations

from pathlib import Path

from cellar import demo
from cellar.core.config import CacheConfig
from cellar.core.errors import CheckpointError
from cellar.core.specs import ModelSpec
from cellar.models.hub import resolve
from cellar.models.registry import auto_dtype, open_model, read_config, shipped_config, shipped_names, with_kv_dtype
from cellar.planner import models


def model_spec(
    name: str | None,
    device: str = "gpu",
    dtype: str = "auto",
    max_model_len: int | None = None,
    *,
    fast_bfloat16: bool | None = None,
    chunk_size: int = CacheConfig().block_size,
    kv_cache_dtype: str = "auto",
) -> ModelSpec:
    """The spec of a directory, a config.json, a hub name, a shipped config's name, one of `planner.models`, or (None or
    `demo`) the demo model.

    `device` is cpu or another kind, for dtype `auto`; `fast_bfloat16` says that the processor multiplies that in
    hardware, if it is not this one. `kv_cache_dtype`: K and V as that option keeps them. Raises
    CheckpointError if there is none, or of an unknown architecture; ConfigError for options out of range.
    """
    kept = CacheConfig(kv_cache_dtype=kv_cache_dtype).kv_cache_dtype
    found = models.known_spec(name) if name is not None and dtype == "auto" and max_model_len is None else None
    if found is not None:
        return with_kv_dtype(found, kept)
    config = shipped_config(name) if name is not None else None
    if config is None:
        config = read_config(demo.path() if name in (None, "demo") else _place(str(name)))
    kind = auto_dtype(config, device, fast_bfloat16) if dtype == "auto" else dtype
    return open_model(config, kind, chunk_size, max_model_len, kv_cache_dtype=kept).spec


def _place(name: str) -> Path:
    """A directory or file that exists, else what the hub has under that name."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if "/" in name:
        return resolve(name)
    names = ", ".join(("demo", *shipped_names(), *models.NAMES))
    raise CheckpointError(
        f"model {name!r} is unknown; give a directory, its config.json, a hub name, or one of {names}."
    )
