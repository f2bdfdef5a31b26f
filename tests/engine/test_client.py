"""What an EngineClient promises, the same over an engine of this process and over one behind a socket."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import RequestError
from cellar.core.messages import (
    FinishReason,
    MemoryAnswer,
    MemoryQuestion,
    Request,
    RequestOutput,
    StepOutput,
    Tier,
)
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.client import StepClient
from cellar.engine.front import Front, Prepared
from cellar.engine.open_streams import OpenStreams
from cellar.engine.prompts import PromptReader
from cellar.runtime.steps.fake import FakeRuntime
from cellar.server.engine_process import Switchboard
from cellar.server.remote import RemoteEngine
from cellar.server.wire import Ready
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER, continuation, engine_of, open_fake
from tests.limits import SECONDS, asked, join_all, until

TEXT = Tokenizer.load(TOKENIZER)
VOCAB = TEXT.vocab_size

Open = Callable[..., tuple[StepClient, FakeRuntime]]


@pytest.fixture(params=["local", "remote"])
def open_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Makes a client and the device at its other end."""
    ends: list[Callable[[], None]] = []

    def open_(**fake: Any) -> tuple[StepClient, FakeRuntime]:
        masker = Masker(GrammarCompiler(TEXT, VOCAB, (2,)))
        opened, runtime = open_fake(masker=masker, **fake)
        engine = engine_of(opened)
        if request.param == "local":
            ends.append(engine.close)
            return engine, runtime
        address = str(tmp_path / "engine")
        board = Switchboard(engine, Ready(opened.config, opened.spec, None, 256), address)
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=board.run, args=(theirs,), daemon=True)
        thread.start()
        remote = RemoteEngine(address)

        def end() -> None:
            remote.close()
            until(lambda: not engine.has_work())
            asked(engine, engine.scheduler.check_integrity)
            ours.close()
            join_all([thread])

        ends.append(end)
        return remote, runtime

    yield open_
    for end in ends:
        end()


class Seen:
    """What a client has told of, by request, in order."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[FinishReason, int | str | None]] = {}

    def take(self, output: StepOutput) -> None:
        for id, token in zip(output.ids, output.tokens, strict=True):
            assert id not in self.finished, "nothing is delivered after the end"
            self.tokens.setdefault(id, []).append(token)
        assert not self.finished.keys() & output.finished.keys(), "one end for each"
        self.finished |= output.finished

    def run(self, client: StepClient, condition: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            for output in client.turn(0.1):
                self.take(output)


def request(id: str, prompt: list[int], max_tokens: int = 6, **params: Any) -> Request:
    made = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0, ignore_eos=True, **params)
    return Request(id, np.array(prompt, np.int32), made, frozenset(), max_tokens)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += continuation(prompt + tokens, count - len(tokens), VOCAB)
    return tokens


def test_many_requests_answer_as_alone(open_client: Open) -> None:
    client, _ = open_client(delay=lambda step: step % 3)
    prompts = {f"r{k}": [k + 3, 5] * (1 + k % 7) for k in range(20)}
    client.add(*(request(id, prompt) for id, prompt in prompts.items()))
    assert client.has_work()
    seen = Seen()
    seen.run(client, lambda: len(seen.finished) == 20)
    assert seen.tokens == {id: expected(prompt, 6) for id, prompt in prompts.items()}
    assert {end[0] for end in seen.finished.values()} == {FinishReason.LENGTH}
    seen.run(client, lambda: not client.has_work() and client.stats().running == 0)
    assert client.stats().generation_tokens == 120


def test_what_was_aborted_or_finished_is_not_heard_of_again(open_client: Open) -> None:
    client, _ = open_client(latency=0.002, num_slots=256)
    client.add(request("dropped", [3], 200), request("stopped", [4], 200), request("other", [5], 60))
    seen = Seen()
    seen.run(client, lambda: len(seen.tokens) == 3 and min(map(len, seen.tokens.values())) >= 3)
    client.abort("dropped")
    client.abort("nobody")
    client.finish("stopped", 2)
    client.finish("nobody", 2)
    before = {id: list(seen.tokens[id]) for id in ("dropped", "stopped")}
    seen.run(client, lambda: "other" in seen.finished)
    assert {id: seen.tokens[id] for id in before} == before
    assert list(seen.finished) == ["other"]
    assert seen.tokens["other"] == expected([5], 60)
    again = Seen()
    client.add(request("dropped", [9]))
    again.run(client, lambda: again.finished)
    assert again.tokens == {"dropped": expected([9], 6)}, "the id may be another's"
    seen.run(client, lambda: client.stats().running == 0)
    assert client.stats().generation_tokens < 200


def test_what_could_never_run_is_refused_and_told_once(open_client: Open) -> None:
    client, _ = open_client(num_slots=4)
    client.add(request("long", [1] * 60, 100), request("fits", [3], 3))
    until(lambda: client.refused())
    (reason,) = client.refused().values()
    assert "chunks" in reason
    seen = Seen()
    seen.run(client, lambda: len(seen.finished) == 2)
    assert seen.finished["long"] == (FinishReason.ERROR, reason)
    assert seen.tokens == {"fits": expected([3], 3)}
    assert not client.refused()


def test_what_is_dropped_before_it_is_told_is_never_told(open_client: Open) -> None:
    client, _ = open_client(num_slots=4)
    client.add(request("long", [1] * 60, 100))
    until(lambda: client.refused())
    client.abort("long")
    assert not client.refused()
    client.add(request("long", [3], 3))
    seen = Seen()
    seen.run(client, lambda: seen.finished)
    assert seen.tokens == {"long": expected([3], 3)}


@pytest.mark.parametrize(
    "damage",
    [{"prompt": "no tokens"}, {"prompt": None}, {"max_tokens": "many"}, {"salt": 7}],
    ids=lambda damage: next(iter(damage)),
)
def test_a_request_that_makes_the_loop_raise_ends_alone(open_client: Open, damage: dict[str, Any]) -> None:
    client, _ = open_client()
    bad = request("bad", [1, 2])
    for name, value in damage.items():
        object.__setattr__(bad, name, value)
    client.add(request("good", [3], 6), bad)
    client.add(request("later", [4], 6))
    seen = Seen()
    seen.run(client, lambda: len(seen.finished) == 3)
    assert seen.finished["bad"][0] is FinishReason.ERROR
    assert seen.tokens == {"good": expected([3], 6), "later": expected([4], 6)}


def test_an_impossible_finish_drops_its_request_alone(open_client: Open) -> None:
    client, _ = open_client(latency=0.002, num_slots=256)
    client.add(request("bad", [3], 200), request("good", [5], 40))
    seen = Seen()
    seen.run(client, lambda: len(seen.tokens) == 2)
    client.finish("bad", 10_000)
    seen.run(client, lambda: seen.finished)
    assert seen.tokens["good"] == expected([5], 40)
    seen.run(client, lambda: client.stats().running == 0)


def test_a_grammar_that_does_not_compile_ends_its_request(open_client: Open) -> None:
    client, _ = open_client()
    asked_for = StructuredOutputsParams(regex="(")
    client.add(request("bad", [3], structured_outputs=asked_for), request("good", [5]))
    seen = Seen()
    seen.run(client, lambda: len(seen.finished) == 2)
    assert seen.finished["bad"][0] is FinishReason.ERROR
    assert "structured output" in str(seen.finished["bad"][1])
    assert seen.tokens == {"good": expected([5], 6)}


def test_messages_of_many_threads_are_read_in_the_thread_that_turns(open_client: Open) -> None:
    client, _ = open_client(num_slots=256)
    owner, threads, wrong = threading.get_ident(), list[threading.Thread](), list[int]()

    def add(id: str, k: int) -> None:
        if threading.get_ident() != owner:
            wrong.append(k)
        client.add(request(id, [k + 3]))

    def post(name: str) -> None:
        for k in range(10):
            client.post(partial(add, f"{name}{k}", k))

    threads = [threading.Thread(target=post, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    seen = Seen()
    seen.run(client, lambda: len(seen.finished) == 40)
    join_all(threads)
    assert not wrong
    assert seen.tokens == {f"{name}{k}": expected([k + 3], 6) for name in "abcd" for k in range(10)}


def test_a_message_ends_the_wait(open_client: Open) -> None:
    client, _ = open_client()
    done = threading.Event()
    timer = threading.Timer(0.05, lambda: client.post(done.set))
    begin = time.monotonic()
    timer.start()
    client.turn(SECONDS)
    client.read()
    assert done.is_set()
    assert time.monotonic() - begin < SECONDS / 2
    join_all([timer])


def test_read_does_what_was_posted_and_starts_nothing(open_client: Open) -> None:
    client, runtime = open_client()
    done: list[int] = []
    client.post(lambda: done.append(1))
    client.post(lambda: client.post(lambda: done.append(2)))
    client.read()
    assert done == [1], "what is posted meanwhile waits"
    client.read()
    assert done == [1, 2]
    assert runtime.num_steps == 0


def test_memory_of_conversations_is_told_and_forgotten(open_client: Open) -> None:
    """Also while a request of one runs, which goes on and leaves nothing; what others share stays."""
    client, _ = open_client(num_slots=256, latency=0.002)
    told: list[MemoryAnswer] = []
    seen = Seen()

    def memory(*names: str, forget: bool = False) -> MemoryAnswer:
        told.clear()
        client.memory(MemoryQuestion(names, forget), told.append)
        seen.run(client, lambda: told)
        return told[0]

    def cached(id: str, prompt: list[int], **more: Any) -> int:
        client.add(replace(request(id, prompt), **more))
        found = dict[str, int]()
        end = time.monotonic() + SECONDS
        while id not in seen.finished:
            assert time.monotonic() < end
            for output in client.turn(0.1):
                found |= output.num_cached_tokens
                seen.take(output)
        return found[id]

    shared, mine, other = [3] * 32, [4] * 40, [5] * 40
    cached("a", shared + mine, conversation="mine")
    cached("b", shared + other, conversation="other")
    here, there, nobody = memory("mine", "other", "nobody")
    assert (here[Tier.DEVICE], there[Tier.DEVICE]) == (77, 77)
    assert nobody == {Tier.DEVICE: 0}

    client.add(replace(request("running", shared + mine, 100), conversation="mine"))
    seen.run(client, lambda: "running" in seen.tokens)
    assert memory("mine", forget=True)[0][Tier.DEVICE] >= 64
    assert memory("mine")[0] == {Tier.DEVICE: 0}
    seen.run(client, lambda: "running" in seen.finished)
    assert seen.tokens["running"] == expected(shared + mine, 100)
    assert memory("mine", "other") == ({Tier.DEVICE: 0}, {Tier.DEVICE: 77})
    assert cached("again", shared + mine) == 32  # what the other conversation shares
    assert cached("other", shared + other) == 64
    memory("other", forget=True)
    assert cached("last", [*shared, 7]) == 32  # what "again" has shared since is its own


def test_no_turn_waits_for_news_while_a_request_waits_to_be_started(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = open_client()
    reader = PromptReader(vocab_size=VOCAB, max_model_len=256, eos_token_ids=(2,), tokenizer=TEXT, seed=0)
    front = Front(client, reader, TEXT, None)
    add = front.add

    def slow(one: Prepared, stream: bool = False) -> None:
        if one.id.startswith("bad"):
            time.sleep(0.1)
            raise RequestError("no.", "prompt")
        add(one, stream)

    monkeypatch.setattr(front, "add", slow)

    async def run() -> None:
        streams = OpenStreams(front)
        streams.start(None)

        async def tokens(id: str) -> int:
            prepared = front.prepare(id, reader.read([1]), SamplingParams(max_tokens=5, ignore_eos=True), owner="mine")
            last = [news async for news in streams.news(prepared, deltas=False)][-1]
            assert isinstance(last, RequestOutput)
            return len(last.outputs[0].token_ids)

        first = asyncio.create_task(tokens("bad-0"))
        await asyncio.sleep(0.03)  # while it is being refused the next two come
        others = [asyncio.create_task(tokens(id)) for id in ("bad-1", "good")]
        async with asyncio.timeout(SECONDS):
            found = await asyncio.gather(first, *others, return_exceptions=True)
        assert [isinstance(one, RequestError) for one in found] == [True, True, False]
        assert found[2] == 5
        streams.close()

    asyncio.run(run())
