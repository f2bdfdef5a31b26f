"""The application for Ray Serve: `serve run cellar.deploy.ray:app model=DIRECTORY`, or a YAML for `serve deploy`.

client -- HTTP --> Front x M -- Cellar's wire: requests, a frame of tokens a step --> Engine x N
                      |                                                                 |
                      +------ who is on duty? --> Roster <------ writes itself in ------+
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray import serve
from ray.serve import Application

from cellar.core.config import EngineConfig
from cellar.deploy.engine import ANSWER_SECONDS, Engine
from cellar.deploy.front import Front
from cellar.deploy.options import read_options
from cellar.deploy.roster import RosterKeeper

MANY = 1_000_000
"""Calls that a replica may have at once: who waits is counted by fronts and engines themselves."""


def app(args: dict[str, Any]) -> Application:
    """Fronts, engines and their roster; a YAML's `deployments` overrides whatever is said here of replicas.

    `args` are options of `cellar serve`. Raises ConfigError.
    """
    options = read_options(args, os.environ)
    drain = options.limits.shutdown_timeout
    roster = serve.deployment(RosterKeeper, name="Roster", max_ongoing_requests=MANY).options(
        ray_actor_options={"num_cpus": 0}, health_check_period_s=1.0
    )
    engine = serve.deployment(Engine, name="Engine", max_ongoing_requests=MANY).options(
        ray_actor_options=resources(options.engine),
        health_check_period_s=1.0,
        health_check_timeout_s=2 * ANSWER_SECONDS,
        graceful_shutdown_timeout_s=2 * drain,
    )
    front = serve.deployment(serve.ingress()(Front), name="Front", max_ongoing_requests=MANY).options(
        ray_actor_options={"num_cpus": 1}, graceful_shutdown_timeout_s=drain
    )
    kept = roster.bind()
    return front.bind(args, kept, engine.bind(args, kept))


def resources(config: EngineConfig) -> dict[str, float]:
    """What an engine takes of a host: a GPU for each rank, unless the device is the CPU or there is no GPU."""
    device = config.device
    if device.device == "cpu" or (device.device == "auto" and not _has_gpu()):
        return {"num_cpus": float(device.num_threads or 1)}
    return {"num_cpus": 1.0, "num_gpus": float(device.num_ranks)}


def _has_gpu() -> bool:
    """Whether the cluster has one; `serve run` asks before it has joined any, and tries on this machine."""
    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU", 0))
    return torch.cuda.is_available()
