"""An engine as Ray Serve keeps it: an actor that holds the engine's process, tells how it is, and drains it.

The actor and its process live and die together: the process ends with the actor's pipe, and the actor when its process
has ended, whereupon Ray starts another one, where there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cellar.core.errors import CellarError
from cellar.core.messages import MemoryAnswer, MemoryQuestion, SchedulerStats
from cellar.deploy.options import read_options
from cellar.deploy.roster import Member
from cellar.deploy.scaling import load_of
from cellar.server.endpoint import Address, Endpoint
from cellar.server.engine_process import EngineProcess
from cellar.server.engine_start import Opener, open_config
from cellar.server.remote import RemoteEngine

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
"""An engine that does not answer a question for so long is dead; no step takes as long."""

WRITE_IN_SECONDS = 1.0
"""How often an engine writes itself into the roster."""

LOOK_SECONDS = 0.1
"""How often an engine that drains looks whether it is empty."""

_EXIT_CODE = 70
"""Of an actor whose engine's process has ended."""


class Ear:
    """A front without requests: hears how an engine is, and asks whether it answers."""

    def __init__(self, address: Address) -> None:
        self._remote = RemoteEngine(address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="cellar-ear", daemon=True)
        self._thread.start()

    def stats(self) -> SchedulerStats:
        """The engine's last snapshot."""
        return self._remote.stats()

    def answers(self, seconds: float) -> bool:
        """Whether its loop turns: it answers a question within some seconds."""
        heard = threading.Event()

        def then(answer: MemoryAnswer | CellarError) -> None:
            heard.set()

        self._remote.post(lambda: self._remote.memory(MemoryQuestion(()), then))
        return heard.wait(seconds)

    def close(self) -> None:
        """Hear no more."""
        self._closing.set()
        self._remote.wake()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._closing.is_set():
                self._remote.turn()
        except Exception as error:
            logger.info("the engine is heard no more (%s)", error)
        finally:
            self._remote.close()


class Engine:
    """The deployment `Engine`: `args` are those of `read_options`, `roster` is where it writes itself in."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, args: Mapping[str, Any], roster: DeploymentHandle
    ) -> None:
        options = read_options(args, os.environ)
        patience = options.limits.shutdown_timeout
        opener: Opener = partial(open_config, options.engine, patience)
        endpoint = Endpoint(ray.util.get_node_ip_address(), 0, secrets.token_bytes(32))
        start = partial(EngineProcess, opener, endpoint, options.server.log_level, patience)
        self._process = await asyncio.to_thread(start)
        self._ear = Ear(self._process.address)
        self._closing = False
        threading.Thread(target=self._end_together, name="cellar-keeper", daemon=True).start()
        assert isinstance(self._process.address, Endpoint)
        self._member = Member(serve.get_replica_context().replica_id.unique_id, self._process.address)
        self._roster = roster
        self._patience = patience
        self._told = asyncio.Event()  # there is something to write at once
        self._writing = asyncio.create_task(self._stay_written_in())

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine's process does not answer; Ray then starts another engine."""
        if not await asyncio.to_thread(self._ear.answers, ANSWER_SECONDS):
            raise RuntimeError(f"the engine has answered nothing for {ANSWER_SECONDS:.0f} s.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `Policy` reads."""
        return load_of(self._ear.stats())

    async def __del__(self) -> None:
        """Ray lets this engine go: it gets no new requests, its streams go on elsewhere, and it ends."""
        self._closing = True
        self._member = replace(self._member, draining=True)
        self._told.set()
        end = time.monotonic() + self._patience
        while time.monotonic() < end and not self._is_empty():
            await asyncio.sleep(LOOK_SECONDS)
        self._writing.cancel()
        self._ear.close()
        await asyncio.to_thread(self._process.close)

    async def _stay_written_in(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._roster.write_in.remote(self._member), ANSWER_SECONDS)
            except Exception as error:
                logger.warning("the roster takes no entry now (%s); it is asked again", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_IN_SECONDS):
                    await self._told.wait()
            self._told.clear()

    def _is_empty(self) -> bool:
        stats = self._ear.stats()
        return not self._process.process.is_alive() or stats.running + stats.waiting == 0

    def _end_together(self) -> None:
        wait([self._process.process.sentinel])
        if not self._closing:
            logger.error("%s; Ray starts another engine", self._process.how_it_ended())
            logging.shutdown()
            os._exit(_EXIT_CODE)
