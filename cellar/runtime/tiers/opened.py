"""Opening the tiers that the options ask for, and saying at the start what each takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from cellar.core.config import CacheConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import Tier
from cellar.core.specs import KVSpec
from cellar.runtime.memory import GIB, human
from cellar.runtime.tiers.disk import DiskTier
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.remote import RemoteOptions, RemoteTier
from cellar.runtime.tiers.storage import Storage

logger = logging.getLogger(__name__)

KEY_VARIABLE = "CELLAR_KV_REMOTE_KEY"
"""Of the environment: the key that seals what a remote tier keeps, where no file of it is named."""


def host_tier(cache: CacheConfig, spec: KVSpec, device: torch.device) -> HostTier | None:
    """The host's memory below the device, if it is asked for. Raises CapacityError if there is not so much."""
    if cache.kv_offloading_size is None:
        return None
    nbytes = spec.chunk_nbytes()
    return HostTier(_host_slots(cache.kv_offloading_size, nbytes), nbytes, device)


def open_tiers(
    cache: CacheConfig,
    spec: KVSpec,
    num_slots: int,
    device: torch.device,
    fingerprint: bytes | None,
    host: HostTier | None = None,
) -> Mapping[Tier, Storage]:
    """Tiers below a device of `num_slots` slots. `fingerprint` is that of the KV, for tiers that outlive the process;
    `host` the host's memory, where it is taken already.

    Raises CapacityError or ConfigError if one cannot be had as asked for.
    """
    tiers: dict[Tier, Storage] = {}
    nbytes = spec.chunk_nbytes()
    try:
        if (memory := host or host_tier(cache, spec, device)) is not None:
            tiers[Tier.HOST] = memory
        if cache.kv_disk_path is not None and cache.kv_disk_size is not None:
            size, path = int(cache.kv_disk_size * GIB), Path(cache.kv_disk_path).expanduser()
            tiers[Tier.DISK] = DiskTier(path, size, _known(fingerprint), nbytes)
        if cache.kv_remote is not None and cache.kv_remote_size is not None:
            size, key = int(cache.kv_remote_size * GIB), _remote_key(cache.kv_remote_key_file)
            options = RemoteOptions(cache.kv_remote, key, size, cache.kv_remote_ttl)
            tiers[Tier.REMOTE] = RemoteTier(options, _known(fingerprint), nbytes)
    except BaseException:
        close_tiers(tiers)
        raise
    if tiers:
        shares = {Tier.DEVICE: num_slots, **{tier: storage.num_slots for tier, storage in tiers.items()}}
        said = (f"{tier.name.lower()} {human(n * nbytes)} ({n:,} chunks)" for tier, n in shares.items())
        logger.info("KV has its place: %s; a chunk is %d tokens, %s", ", ".join(said), spec.chunk_size, human(nbytes))
        for tier, storage in tiers.items():
            if tier.persistent and (found := len(storage.kept())):
                logger.info("%s chunks are there from before: %s", f"{found:,}", tier.name.lower())
    return tiers


def close_tiers(tiers: Mapping[Tier, Storage]) -> None:
    """Let go of tiers that no copier has."""
    for storage in tiers.values():
        storage.close()


def _known(fingerprint: bytes | None) -> bytes:
    if fingerprint is None:
        raise ConfigError("KV that survives a restart needs an engine that knows whose it is; leave it out.")
    return fingerprint


def _remote_key(path: str | None) -> str:
    """The operator's key. Raises ConfigError if there is none."""
    if path is not None:
        try:
            return Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"kv_remote_key_file cannot be read ({error}); give a file with the key.") from error
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        return key
    raise ConfigError(
        f"kv_remote needs a key that seals what is kept there; set kv_remote_key_file or {KEY_VARIABLE}. Make one "
        "with: openssl rand -hex 32"
    )


def _host_slots(size: float, nbytes: int) -> int:
    wanted = int(size * GIB)
    if wanted < nbytes:
        raise CapacityError(
            f"kv_offloading_size asks for {human(wanted)} of host memory, but one chunk takes {human(nbytes)}; "
            "ask for more, or leave it out."
        )
    return wanted // nbytes
