"""Options of a deployment: those of `cellar serve`, by the same names; URLs with passwords by the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from cellar.core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    ScheduleConfig,
)
from cellar.core.errors import ConfigError
from cellar.server.config import LimitConfig, ServerConfig

CONVERSATION_STORE, KV_REMOTE = "CELLAR_CONVERSATION_STORE", "CELLAR_KV_REMOTE"
"""Of the environment: URLs of PostgreSQL and of Redis, which hold passwords."""

_PARTS = (ModelConfig, CacheConfig, ScheduleConfig, DeviceConfig, OffloadConfig, ServerConfig, LimitConfig)

_NOT_HERE: dict[str, str] = {
    "host": "http_options of the YAML say where Ray listens",
    "port": "http_options of the YAML say where Ray listens",
    "ssl_certfile": "http_options of the YAML name the certificate",
    "ssl_keyfile": "http_options of the YAML name the certificate's key",
    "api_server_count": "num_replicas of the deployment Front says how many fronts there are",
    "replicas": "num_replicas of the deployment Engine says how many engines there are",
    "disable_frontend_multiprocessing": "fronts and engines are processes of their own here",
    "api_key": "Ray shows arguments to whoever sees its dashboard; set CELLAR_API_KEY on every node, or api_key_file",
    "kv_disk_path": "a directory belongs to one engine; engines share kv_remote",
    "kv_disk_size": "a directory belongs to one engine; engines share kv_remote",
}
"""Options of `cellar serve` that have no place in a deployment, and what has it instead."""


@dataclass(frozen=True, slots=True)
class Options:
    """What engines and fronts are started with."""

    engine: EngineConfig
    server: ServerConfig
    limits: LimitConfig


def read_options(args: Mapping[str, Any], environment: Mapping[str, str]) -> Options:
    """Options of a YAML's `args`, or of `serve run ... name=value`, where every value is text.

    URLs that are not given come from the `environment`. Raises ConfigError.
    """
    given = dict(args)
    for name, variable in (("conversation_store", CONVERSATION_STORE), ("kv_remote", KV_REMOTE)):
        if name not in given:
            if url := environment.get(variable, "").strip():
                given[name] = url
        elif urlsplit(str(given[name])).password:
            raise ConfigError(
                f"{name} holds a password, and Ray shows arguments to whoever sees its dashboard; set {variable} on "
                "every node instead."
            )
    parts: dict[type, dict[str, Any]] = {kind: {} for kind in _PARTS}
    for name, value in given.items():
        if name in _NOT_HERE:
            raise ConfigError(f"{name} has no place in a deployment by Ray: {_NOT_HERE[name]}.")
        kind = next((kind for kind in _PARTS if name in kind.__dataclass_fields__), None)
        if kind is None:
            raise ConfigError(_unknown(name))
        parts[kind][name] = _typed(kind, name, value)
    if ":" in str(given.get("device", "")):
        raise ConfigError(f"device is {given['device']}, but Ray hands out GPUs; leave the number out.")
    engine = EngineConfig.of(**{k: v for kind in _PARTS[:5] for k, v in parts[kind].items()}).serving()
    return Options(engine, ServerConfig(**parts[ServerConfig]), LimitConfig(**parts[LimitConfig]))


def _typed(kind: type, name: str, value: Any) -> Any:
    """The value as its field wants it; text is read."""
    hint = get_type_hints(kind)[name]
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removesuffix(".")
        raise ConfigError(
            f"{name} is {value!r}, which cannot be read ({said}); give it as `cellar serve` wants it."
        ) from error


def _unknown(name: str) -> str:
    known = [field for kind in _PARTS for field in kind.__dataclass_fields__ if field not in _NOT_HERE]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "the options are those of `cellar serve`."
    return f"option {name!r} is not known; {hint}"
