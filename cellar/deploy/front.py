"""A front as Ray Serve keeps it: the application of `cellar serve` over the engines that the roster names."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from cellar.deploy.options import read_options
from cellar.deploy.roster import Member
from cellar.server.app import build_app
from cellar.server.host import ServedModel
from cellar.server.keys import check_quota, with_keys
from cellar.server.pool.host import PoolHost
from cellar.server.run import model_names

logger = logging.getLogger(__name__)

FIRST_SECONDS = 3600.0
"""How long a front waits for the first engine: a large model takes a while to load."""

AGAIN_SECONDS = 1.0
"""A roster that cannot be read is asked again after so long."""


class Front:
    """The deployment `Front`, an ingress of Ray Serve: `args` are those of `read_options`, `roster` names the engines.

    `engines` makes them part of the application; nothing goes through Ray's handle.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, args: Mapping[str, Any], roster: DeploymentHandle, engines: DeploymentHandle
    ) -> None:
        options = read_options(args, os.environ)
        server = with_keys(options.server)
        check_quota(server, options.limits)
        self._roster = roster
        self._host = host = PoolHost()
        self._reading = asyncio.create_task(self._read())
        await asyncio.to_thread(host.wait, FIRST_SECONDS)
        names = model_names(options.engine, server)
        self._app = build_app(host, ServedModel.of(host.opened, names), server, options.limits)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve serves; its end closes the application and leaves the engines."""
        return self._app

    def __del__(self) -> None:
        """The application has ended before."""
        self._reading.cancel()

    async def _read(self) -> None:
        known = -1
        while True:
            try:
                known, members = await self._roster.members.remote(known)
                self._heard(members)
            except Exception as error:
                logger.warning("the roster cannot be read now (%s); it is asked again", error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _heard(self, members: Sequence[Member]) -> None:
        """Call whom it may call, whether it was called before or not: it may have been out of reach."""
        for member in members:
            if member.draining:
                self._host.drain(member.endpoint)
            else:
                self._host.add(member.endpoint)
