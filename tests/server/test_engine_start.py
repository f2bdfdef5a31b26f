"""An engine's process begins before the server has imported anything large, and nobody's engine is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from cellar.core.config import DeviceConfig
from cellar.core.errors import CellarError
from cellar.engine.opened import Opened
from cellar.server.config import ServerConfig
from cellar.server.engine_process import EngineProcess
from cellar.server.engine_start import EngineStart
from tests.limits import SECONDS, run_python
from tests.server.fake_process import open_engine


def open_and_tell(begun: Event) -> Opened:
    opened = open_engine()
    begun.set()
    return opened


def test_a_model_is_opened_before_anybody_says_where_to_listen(tmp_path: Path) -> None:
    begun = multiprocessing.get_context("spawn").Event()
    opener = partial(open_and_tell, begun)
    with EngineStart(opener, device=DeviceConfig(device="cpu")) as start:
        assert begun.wait(SECONDS)
        assert not start.pipe.poll()
        engine = EngineProcess(opener, str(tmp_path / "engine"), start=start)
        assert engine.process is start.process
        assert engine.address == str(tmp_path / "engine")
        engine.close()
        assert engine.process.exitcode == 0


def test_an_engine_that_nobody_takes_ends() -> None:
    start = EngineStart(partial(time.sleep, SECONDS))  # type: ignore[arg-type]
    with pytest.raises(CellarError, match="port"), start:
        raise CellarError("the port is taken.")
    assert start.process.exitcode == -signal.SIGKILL


def refuse() -> Opened:
    raise CellarError("there is no such model.")


def test_what_an_engine_said_is_heard_though_it_has_ended_since(tmp_path: Path) -> None:
    """A server that imports slowly comes to a process that has failed and gone."""
    start = EngineStart(refuse)
    start.process.join(SECONDS)
    assert start.process.exitcode == 0
    with pytest.raises(CellarError, match="no such model"), start:
        EngineProcess(refuse, str(tmp_path / "engine"), start=start)


def end_by(number: int) -> Opened:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # it leaves ends to its server
    os.kill(os.getpid(), number)
    raise AssertionError("it has ended")


def test_whose_engine_is_killed_as_it_opens_learns_what_to_lower(tmp_path: Path) -> None:
    """A system that has no memory left kills; by any other signal an engine ends for reasons of its own."""
    with pytest.raises(CellarError) as killed:
        EngineProcess(partial(end_by, signal.SIGKILL), str(tmp_path / "engine"))
    assert str(killed.value) == (
        "the engine process has ended by signal 9, as a system ends whoever takes the last of its memory: lower "
        "kv_offloading_size or, on the CPU, kv_cache_memory_bytes."
    )
    with pytest.raises(CellarError) as ended:
        EngineProcess(partial(end_by, signal.SIGTERM), str(tmp_path / "engine"))
    assert str(ended.value) == "the engine process has ended by signal 15."


def test_whose_server_is_gone_ends_by_itself() -> None:
    begun = multiprocessing.get_context("spawn").Event()
    start = EngineStart(partial(open_and_tell, begun))
    start.pipe.close()
    start.process.join(SECONDS)
    assert start.process.exitcode == 0
    assert begun.is_set()


def test_a_server_starts_its_engine_before_it_imports() -> None:
    """Torch, fastapi and what stands on them take a server as long as an engine takes to be ready."""
    code = """
import sys
from cellar.server import engine_start

def of(*arguments):
    print([name for name in ("torch", "fastapi", "tokenizers") if name in sys.modules])
    raise SystemExit(0)

engine_start.EngineStart.of = of
sys.argv = ["cellar", "serve", "--device", "cpu", "--port", "0"]
from cellar.__main__ import main
main()
"""
    assert run_python(code).splitlines() == ["[]"]


def test_only_one_engine_beside_one_front_is_begun_so() -> None:
    assert ServerConfig().has_one_engine_beside
    assert not ServerConfig(replicas=2).has_one_engine_beside
    assert not ServerConfig(api_server_count=2).has_one_engine_beside
    assert not ServerConfig(disable_frontend_multiprocessing=True).has_one_engine_beside
