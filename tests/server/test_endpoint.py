"""An engine that listens on a port: who has the key comes in, and nobody else, however they try."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe

import pytest

from cellar import AsyncLLM, SamplingParams
from cellar.server import endpoint, engine_process
from cellar.server.endpoint import Endpoint, connect
from cellar.server.engine_process import EngineProcess, Switchboard
from cellar.server.remote import RemoteEngine
from cellar.server.supervisor import Link
from cellar.server.wire import Ready
from tests.fake_front import open_fake
from tests.limits import SECONDS, join_all, until
from tests.server.fake_process import attach, open_engine
from tests.server.served import plain

KEY = os.urandom(32)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(open_engine, Endpoint("127.0.0.1", 0, KEY))
    yield process
    process.close()


def address_of(engine: EngineProcess) -> Endpoint:
    assert isinstance(engine.address, Endpoint)
    return engine.address


def answers(link: Link) -> None:
    async def ask(llm: AsyncLLM) -> list[int]:
        async for output in llm.generate([5, 6, 7], GREEDY):
            last = output
        return list(last.outputs[0].token_ids)

    assert link.llm is not None
    assert asyncio.run(ask(link.llm)) == plain([5, 6, 7], 12)


def raw(address: Endpoint) -> socket.socket:
    return socket.create_connection((address.host, address.port), SECONDS)


def test_a_front_with_the_key_is_served(engine: EngineProcess) -> None:
    address = address_of(engine)
    assert address.port > 0
    link = Link(address, attach)
    answers(link)
    link.leave()


def test_another_key_opens_nothing(engine: EngineProcess) -> None:
    with pytest.raises(ConnectionRefusedError):
        RemoteEngine(replace(address_of(engine), key=os.urandom(32)))


def test_what_a_stranger_sends_is_not_unpickled(engine: EngineProcess) -> None:
    """Frames as `Connection.send` makes them, with the key's proof left out."""
    with raw(address_of(engine)) as sock:
        sock.settimeout(None)
        connection = Connection(os.dup(sock.fileno()))
        assert connection.recv_bytes(256).startswith(b"#CHALLENGE#")
        connection.send_bytes(pickle.dumps(partial(os._exit, 3)))
        assert connection.recv_bytes(256) == b"#FAILURE#"
        with pytest.raises((EOFError, OSError)):  # and the door is shut
            connection.recv_bytes(256)
        connection.close()
    assert engine.process.is_alive()


def test_an_engine_without_the_key_is_not_believed() -> None:
    """Whoever has taken the port of an engine that died learns nothing and is not read."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        host, port = impostor.getsockname()
        reached: list[bytes] = []

        def pretend() -> None:
            sock, _ = impostor.accept()
            connection = Connection(sock.detach())
            connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
            reached.append(connection.recv_bytes(256))
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes(256)
            connection.send_bytes(b"no digest")
            connection.close()

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(ConnectionRefusedError):
            connect(Endpoint(host, port, KEY))
        thread.join(SECONDS)
        assert reached
        assert KEY not in reached[0]


@pytest.mark.long
def test_who_says_nothing_holds_up_nobody_and_is_shown_out(engine: EngineProcess) -> None:
    silent = [raw(address_of(engine)) for _ in range(8)]
    link = Link(address_of(engine), attach)
    answers(link)
    link.leave()
    for sock in silent:
        sock.settimeout(SECONDS)
        while sock.recv(4096):
            pass  # its challenge, then the end
        sock.close()


def test_a_client_does_not_wait_for_ever_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ADMIT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(OSError):
        connect(Endpoint(*mute.getsockname(), KEY))


def test_a_key_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 random"):
        Endpoint("127.0.0.1", 0, b"secret")


def test_the_key_is_not_printed() -> None:
    assert "key" not in repr(Endpoint("127.0.0.1", 0, KEY))


def test_strangers_that_say_nothing_keep_no_front_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a thread for five seconds, however many there were."""
    monkeypatch.setattr(endpoint, "ADMIT_SECONDS", 10 * SECONDS)
    opened, _ = open_fake()
    ready = Ready(opened.config, opened.spec, None, opened.front.reader.max_model_len)
    board = Switchboard(opened.front.engine, ready, Endpoint("127.0.0.1", 0, KEY))
    ours, theirs = Pipe()
    running = threading.Thread(target=board.run, args=(theirs,), daemon=True)
    running.start()
    assert isinstance(board.address, Endpoint)
    with ExitStack() as held:
        strangers = {held.enter_context(raw(board.address)) for _ in range(3 * endpoint.MAX_UNPROVEN)}
        # All but so many are shut, long before their time is over; which ones is for their threads to decide.
        while len(strangers) > endpoint.MAX_UNPROVEN:
            told, _, _ = select.select(strangers, [], [], SECONDS)
            assert told, f"{len(strangers)} strangers are still there"
            strangers -= {sock for sock in told if not sock.recv(4096)}
        link = Link(board.address, attach)
        answers(link)
        link.leave()
    ours.close()
    join_all([running])


def test_who_cannot_let_anybody_in_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors every call failed at once, and was made again at once."""
    calls: list[float] = []

    class Full:
        def accept(self) -> Connection:
            calls.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")

        def close(self) -> None:
            pass

    monkeypatch.setattr(engine_process, "listen", lambda address: (Full(), address))
    opened, _ = open_fake()
    board = Switchboard(opened.front.engine, Ready(opened.config, opened.spec, None, 64), Endpoint("", 1, KEY))
    ours, theirs = Pipe()
    running = threading.Thread(target=board.run, args=(theirs,), daemon=True)
    running.start()
    until(lambda: len(calls) >= 4)
    ours.close()
    join_all([running])
    assert calls[-1] - calls[0] > 0.9 * engine_process.BUSY_SECONDS * (len(calls) - 1)
