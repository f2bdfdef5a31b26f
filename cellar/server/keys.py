"""API keys: where they come from, and whom each belongs to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, MutableMapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cellar.core.errors import ConfigError
from cellar.server.config import LimitConfig, ServerConfig

VARIABLE = "CELLAR_API_KEY"
"""Of the environment: keys, separated by commas."""

_STATE = "owner"


def read_keys(option: str | Iterable[str] | None, file: str | None) -> tuple[str, ...]:
    """Keys of the option, which may have several separated by commas, and of the file. Raises ConfigError."""
    given = (option,) if isinstance(option, str) else tuple(option or ())
    keys = [key.strip() for one in given for key in one.split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file cannot be read ({error}); give a text file, one key a line.") from error
        keys += [line.strip() for line in lines if not line.lstrip().startswith("#")]
    found = tuple(dict.fromkeys(key for key in keys if key))
    if not found and (given or file is not None):
        raise ConfigError("api_key or api_key_file is given, but holds no key; a server without keys needs neither.")
    return found


def with_keys(server: ServerConfig) -> ServerConfig:
    """The same options with all keys in `api_key`: those of the options and those of the environment.

    For the process that a person has started: what is wrong is found at once, children get the keys through their pipe,
    and those given by option leave the list of processes. Raises ConfigError.
    """
    keys = read_keys(server.api_key, server.api_key_file)
    from_environment = tuple(key for one in os.environ.get(VARIABLE, "").split(",") if (key := one.strip()))
    if server.api_key is not None:
        hide(read_keys(server.api_key, None))
    return replace(server, api_key=(*keys, *from_environment) or None, api_key_file=None)


def digest_of(key: bytes) -> str:
    """Whom a key belongs to: 24 hexadecimal digits that tell nothing of a key which cannot be guessed."""
    return blake2b(key, digest_size=12, person=b"cellar-owner").hexdigest()


def owners_of(server: ServerConfig) -> tuple[str, ...]:
    """Whom the keys of a server belong to, in their order. Raises ConfigError."""
    return tuple(digest_of(os.fsencode(key)) for key in read_keys(server.api_key, server.api_key_file))


def check_quota(server: ServerConfig, limits: LimitConfig) -> None:
    """Raises ConfigError for limits on what one key may do if there are no keys: nobody would be held to them."""
    for name in ("max_key_queued_requests", "max_key_queued_tokens"):
        if getattr(limits, name) is not None and not read_keys(server.api_key, server.api_key_file):
            raise ConfigError(f"{name} counts for each API key, and there is none; give keys, or leave it out.")


def owner_of(scope: MutableMapping[str, Any]) -> str:
    """Who sent a request: the digest of its API key, "" if it has none."""
    return str(scope.get("state", {}).get(_STATE, ""))


def set_owner(scope: MutableMapping[str, Any], owner: str) -> None:
    """Write down who sent a request."""
    scope.setdefault("state", {})[_STATE] = owner


def hide(secrets: Iterable[str]) -> bool:
    """Overwrite secrets in this process's command line, as others see it. False where that cannot be done (not Linux).

    The kernel shows the bytes that the program was started with, where they lie in its own memory; proc(5) says where:
    fields 48 and 49 of /proc/PID/stat.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(fields[k - 3]) for k in (48, 49))
    except (OSError, ValueError, IndexError):
        return False
    if not 0 < start < end:
        return False
    line = ctypes.string_at(start, end - start)
    for secret in secrets:
        hidden = os.fsencode(secret)
        line = line.replace(hidden, b"*" * len(hidden))
    ctypes.memmove(start, line, len(line))
    return True
