"""CellEngine: sync and async, streams, aborts; bad requests end alone and memory returns."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cellar.cells import Cell, CellModel, Graph
from cellar.core.cell_graphs import CellConfig
from cellar.core.errors import ConfigError, DeviceError, IntegrityError, RequestError
from cellar.core.tasks import CellCapacity, TaskPlan, Values
from cellar.engine.cells import CellEngine
from cellar.runtime.cells.executor import CellExecutor
from cellar.runtime.cells.fake import FakeCellRuntime
from cellar.runtime.cells.local import LocalCellRuntime
from tests.limits import SECONDS, join_all, until

VOCAB = 50
BAD, RAISES, MISSHAPEN = 47, 48, 49


class Count(nn.Module):
    """A state of 3 numbers, and the next token; some tokens make it fail."""

    def forward(self, token: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (token == RAISES).any():
            raise ValueError("this token cannot be computed")
        s = (s + token[:, None] + torch.arange(3.0)) % 40
        s = torch.where((token == BAD)[:, None], torch.tensor(float("nan")), s)
        if (token == MISSHAPEN).any():
            s = s[:, :2]
        return s, torch.nan_to_num(s.sum(-1)).long() % 40


COUNT = Cell("count", Count(), ("s", "token"), batch_sizes=(1, 4, 16), shapes={"s": (3,)}, high={"token": VOCAB})


def unfold_sum(graph: Graph, tokens: list[int]) -> Any:
    return {"s": graph.chain(COUNT, len(tokens), each={"token": tokens}, carry={"s": "s"})[-1]["s"]}


def unfold_write(graph: Graph, tokens: list[int], limit: int = 8, stop: int | None = None) -> Any:
    steps = graph.chain(COUNT, len(tokens), each={"token": tokens}, carry={"s": "s"})
    grown = graph.grow(
        COUNT,
        limit,
        carry={"s": "s", "token": "token"},
        first={"s": steps[-1]["s"], "token": steps[-1]["token"]},
        stop=None if stop is None else ("token", stop),
    )
    return {"tokens": grown["token"], "first": steps[0]["token"]}


def models() -> list[CellModel]:
    return [
        CellModel("sum", [COUNT], unfold_sum, {"tokens": [1, 2]}, max_nodes=1000),
        CellModel("write", [COUNT], unfold_write, {"tokens": [1, 2]}),
    ]


def fake(made: Sequence[CellModel], rows: int = 400, workers: int = 1, **options: Any) -> FakeCellRuntime:
    """A fake that computes the models' own cells."""

    def compute(m: int, c: int, inputs: Sequence[Values]) -> Sequence[Values]:
        outputs = made[m].cells[c].run([torch.as_tensor(values) for values in inputs])
        return [output.numpy() for output in outputs]

    capacity = CellCapacity(tuple(tuple(rows for _ in model.spec.banks) for model in made), workers)
    return FakeCellRuntime([model.spec for model in made], capacity, compute=compute, **options)


@pytest.fixture
def engine() -> Iterator[CellEngine]:
    made = models()
    with CellEngine(made, fake(made, workers=2), CellConfig(max_tasks=3), check_seconds=0.0) as opened:
        yield opened


def local(made: Sequence[CellModel]) -> CellEngine:
    runtime = LocalCellRuntime(
        [model.spec for model in made],
        [model.modules for model in made],
        devices=["cpu"],
        rows=[[400 for _ in model.spec.banks] for model in made],
    )
    return CellEngine(made, runtime, check_seconds=0.0)


def tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(40) for _ in range(rng.randint(1, 12))]


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def balanced(engine: CellEngine) -> bool:
    """All rows of all workers are back but the zero frames."""
    engine.scheduler.check_integrity()
    capacity = engine.runtime.capacity
    return all(
        free == capacity.num_workers * (rows // bank.width * bank.width - bank.width)
        for model, counts, found in zip(engine.scheduler.models, capacity.rows, engine.stats().free_rows, strict=True)
        for bank, rows, free in zip(model.banks, counts, found, strict=True)
    )


def test_run_answers_in_order(engine: CellEngine) -> None:
    rng = random.Random(0)
    requests = [{"tokens": tokens(rng)} for _ in range(30)]
    for name in ("sum", "write"):
        for fields, answer in zip(requests, engine.run(name, requests), strict=True):
            assert equal(answer, engine.models[name].evaluate(fields))
    assert balanced(engine)


def test_a_stop_symbol_ends_a_request_early(engine: CellEngine) -> None:
    whole = engine.run("write", [{"tokens": [1, 2], "limit": 8}])[0]["tokens"].tolist()
    (cut,) = engine.run("write", [{"tokens": [1, 2], "limit": 8, "stop": whole[3]}])
    assert cut["tokens"].tolist() == whole[: whole.index(whole[3])]
    (nothing,) = engine.run("write", [{"tokens": [1, 2], "stop": whole[0]}])
    assert nothing["tokens"].tolist() == []


def test_submit_from_many_threads(engine: CellEngine) -> None:
    engine.start()
    wrong: list[Any] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            name, fields = rng.choice(["sum", "write"]), {"tokens": tokens(rng)}
            if not equal(engine.submit(name, fields).result(SECONDS), engine.models[name].evaluate(fields)):
                wrong.append(fields)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert not wrong
    assert engine.run("sum", [{"tokens": [1]}])[0]["s"].tolist() == [1, 2, 3], "run works beside the thread"


def test_many_at_once_are_answered_in_order(engine: CellEngine) -> None:
    rng = random.Random(1)
    requests = [{"tokens": tokens(rng)} for _ in range(20)]
    unfolded = [engine.unfold("write", fields) for fields in requests]
    engine.start()
    futures = [engine.submit_many("write", unfolded[:13]), engine.submit_many("write", unfolded[13:])]
    answers = [answer for future in futures for answer in future.result(SECONDS)]
    for fields, answer in zip(requests, answers, strict=True):
        assert equal(answer, engine.models["write"].evaluate(fields))
    assert engine.submit_many("write", []).result(0) == []


def test_of_many_at_once_those_that_fail_are_told_and_ids_are_their_own() -> None:
    with local(models()) as engine:
        good, bad = (engine.unfold("sum", {"tokens": given}) for given in ([1, 2], [1, BAD]))
        future = engine.submit_many("sum", [good, bad, good], ids=["a", "b", "c"])
        for ids in (["a", "d"], ["e", "e"]):
            with pytest.raises(RequestError, match="own"):
                engine.submit_many("sum", [good, good], ids=ids)
        engine._driver.drive()
        first, second, third = future.result(0)
        assert equal(first, third)
        assert isinstance(second, RequestError)
        assert balanced(engine)


def test_many_at_once_are_cancelled_together(engine: CellEngine) -> None:
    unfolded = [engine.unfold("write", {"tokens": [1], "limit": 50_000}) for _ in range(3)]
    future = engine.submit_many("write", unfolded, ids=["a", "b", "c"])
    other = engine.submit_many("sum", [engine.unfold("sum", {"tokens": [1]})])
    for _ in range(3):
        engine.front.deliver(engine.engine.turn(0.0))
    engine.abort("b")
    engine._driver.drive()
    assert future.cancelled()
    assert other.result(0)[0]["s"].tolist() == [1, 2, 3]
    assert balanced(engine)


def test_a_stream_gives_every_step_and_then_the_whole(engine: CellEngine) -> None:
    engine.start()

    async def read() -> tuple[list[int], Any]:
        steps = []
        async for part in engine.stream("write", {"tokens": [3, 4], "limit": 6}):
            steps += [part.values["tokens"]] if part.values else []
            last = part
        assert last.last
        return steps, last.response

    steps, response = asyncio.run(read())
    assert steps == response["tokens"].tolist()
    assert len(steps) == 6


def test_leaving_a_stream_aborts_the_request(engine: CellEngine) -> None:
    engine.start()

    async def leave() -> None:
        async for _ in engine.stream("write", {"tokens": [3, 4], "limit": 50_000}):
            break

    asyncio.run(leave())
    until(lambda: not engine.stats().running)
    assert engine.stats().nodes < 50_000


def test_cancelling_a_future_aborts_the_request(engine: CellEngine) -> None:
    future = engine.submit("write", {"tokens": [1], "limit": 50_000})
    other = engine.submit("sum", {"tokens": [1]})
    for _ in range(3):
        engine.front.deliver(engine.engine.turn(0.0))
    future.cancel()
    engine._driver.drive()
    with pytest.raises(CancelledError):
        future.result(0)
    assert other.result(0)["s"].tolist() == [1, 2, 3]
    assert balanced(engine)


def test_finish_answers_with_what_there_is(engine: CellEngine) -> None:
    future = engine.submit("write", {"tokens": [1], "limit": 50_000}, id="long")
    seen: list[Any] = []
    for _ in range(8):
        engine.front.deliver(engine.engine.turn(0.0))
    engine.finish("long", 3)
    engine._driver.drive()
    assert len(future.result(0)["tokens"]) <= 3
    assert not seen
    assert balanced(engine)


# -- bad requests -----------------------------------------------------------------------------------

ALONE = [
    ({"tokens": [1, BAD, 2]}, "not finite"),
    ({"tokens": [1, RAISES]}, "cannot be computed"),
    ({"tokens": [MISSHAPEN, 1]}, "count"),
    ({"tokens": [1, VOCAB]}, "outside of"),
    ({"tokens": []}, "does not exist"),
    ({"tokens": [1] * 2000}, "more than 1000 nodes"),
    ({"token": [1]}, "missing"),
    ({"tokens": [1] * 999}, None),
]


def test_bad_requests_end_alone() -> None:
    """On the real runtime: every bad request among good ones, all in the same batches."""
    made = models()
    good = {"tokens": [1, 2, 3, 4, 5]}
    requests = [fields for bad, _ in ALONE for fields in (good, bad, good)]
    with local(made) as engine:
        answers = engine.run("sum", requests, raise_errors=False)
        for k, (_, message) in enumerate(ALONE):
            before, answer, after = answers[3 * k : 3 * k + 3]
            assert equal(before, made[0].evaluate(good))
            assert equal(after, made[0].evaluate(good))
            if message is None:
                assert not isinstance(answer, Exception)
            else:
                assert isinstance(answer, RequestError), (message, answer)
                assert message in str(answer)
        with pytest.raises(RequestError):
            engine.run("sum", requests)
        assert balanced(engine)


def test_a_request_larger_than_memory_is_refused_and_the_others_run() -> None:
    def unfold(graph: Graph, count: int) -> Any:
        return graph.map(COUNT, count, each={"token": [1] * count})["s"]

    made = [CellModel("wide", [COUNT], unfold, {"count": 2})]
    with CellEngine(made, fake(made, rows=40), check_seconds=0.0) as engine:
        answers = engine.run("wide", [{"count": 3}, {"count": 300}, {"count": 4}], raise_errors=False)
        assert [len(answers[0]), len(answers[2])] == [3, 4]
        assert "send a smaller one" in str(answers[1])
        assert balanced(engine)


def test_more_requests_than_fit_wait_their_turn() -> None:
    made = models()[:1]
    with CellEngine(made, fake(made, rows=40), check_seconds=0.0) as engine:
        answers = engine.run("sum", [{"tokens": [k % 40] * 9} for k in range(60)])
        assert all(equal(answers[k], made[0].evaluate({"tokens": [k % 40] * 9})) for k in range(60))
        assert balanced(engine)


def test_tasks_that_fail_as_a_whole_end_their_requests_only() -> None:
    made = models()[:1]

    def broken(plan: TaskPlan) -> str | None:
        return "the device hiccuped" if plan.plan == 0 else None

    with CellEngine(made, fake(made, break_=broken), check_seconds=0.0) as engine:
        first, *_ = engine.run("sum", [{"tokens": [1]}], raise_errors=False)
        assert "hiccuped" in str(first)
        assert engine.run("sum", [{"tokens": [1]}])[0]["s"].tolist() == [1, 2, 3]
        assert balanced(engine)


def test_an_engine_that_breaks_tells_everyone(engine: CellEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any) -> None:
        raise IntegrityError("the books do not balance")

    monkeypatch.setattr(engine.scheduler, "plan", defect)
    engine.start()
    with pytest.raises(DeviceError, match="do not balance"):
        engine.submit("sum", {"tokens": [1]}).result(SECONDS)
    with pytest.raises(DeviceError, match="has stopped"):
        engine.submit("sum", {"tokens": [1]})


def test_close_answers_open_requests() -> None:
    made = models()
    engine = CellEngine(made, fake(made, latency=0.01))
    engine.start()
    future = engine.submit("write", {"tokens": [1], "limit": 90_000})
    until(lambda: engine.stats().tasks)
    many = engine.submit_many("write", [engine.unfold("write", {"tokens": [1], "limit": 90_000})] * 2)
    engine.close()
    with pytest.raises(DeviceError, match="closed"):
        future.result(SECONDS)
    assert all(isinstance(answer, DeviceError) for answer in many.result(SECONDS))
    with pytest.raises(DeviceError, match="closed"):
        engine.submit("write", {"tokens": [1]})


def test_unknown_models_and_equal_names_are_refused(engine: CellEngine) -> None:
    with pytest.raises(RequestError, match="no model 'nobody'"):
        engine.submit("nobody", {})
    made = models()[:1] * 2
    with pytest.raises(ConfigError, match="different names"):
        CellEngine(made, fake(made))


def test_equal_ids_are_refused(engine: CellEngine) -> None:
    engine.submit("sum", {"tokens": [1]}, id="a")
    with pytest.raises(RequestError, match="its own id"):
        engine.submit("sum", {"tokens": [1]}, id="a")


@pytest.mark.parametrize("options", [{"max_tasks": 0}, {"run_ahead": 0}, {"graph_batch": -1}, {"max_tasks": 33}])
def test_the_config_is_checked(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        CellConfig(**options)


class Quit(nn.Module):
    """Raises what is no Exception for some numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 1).any():
            sys.exit("bye")
        if (x == 2).any():
            raise KeyboardInterrupt
        if (x == 3).any():
            raise GeneratorExit
        return x + 1


QUIT = Cell("quit", Quit(), ("y",), batch_sizes=(1, 8))


def unfold_quit(graph: Graph, x: list[float], how: str = "") -> Any:
    if how == "unfold":
        sys.exit("bye")
    return graph.map(QUIT, len(x), each={"x": x})["y"]


def test_a_cell_that_raises_what_is_no_exception_ends_its_request_alone() -> None:
    with local([CellModel("quit", [QUIT], unfold_quit, {"x": [0.0, 5.0]})]) as engine:
        engine.start()
        for _ in range(2):
            futures = [engine.submit("quit", {"x": [float(k), 7.0]}) for k in range(6)]
            for k, future in enumerate(futures):
                if k in (1, 2, 3):
                    with pytest.raises(RequestError, match=r"SystemExit: bye|KeyboardInterrupt|GeneratorExit"):
                        future.result(SECONDS)
                else:
                    assert future.result(SECONDS).tolist() == [k + 1, 8]
        with pytest.raises(RequestError, match="unfold raised SystemExit: bye"):
            engine.submit("quit", {"x": [0.0], "how": "unfold"})
        assert engine.running


def test_a_worker_outlives_whatever_its_executor_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside of a cell's own call: later plans run, and nobody waits for ever."""
    with local([CellModel("quit", [QUIT], unfold_quit, {"x": [0.0, 5.0]})]) as engine:
        engine.start()
        with monkeypatch.context() as patch:
            patch.setattr(CellExecutor, "prepare", lambda *_: sys.exit(3))
            with pytest.raises(RequestError, match="SystemExit"):
                engine.submit("quit", {"x": [0.0]}).result(SECONDS)
        assert engine.submit("quit", {"x": [4.0]}).result(SECONDS).tolist() == [5]


def test_cancelling_thousands_that_wait_is_quick() -> None:
    """Near-linear: 16,000 took 3 s and more when each was searched for."""
    made = models()[:1]

    def seconds(count: int) -> float:
        engine = CellEngine(made, fake(made))
        unfolded = engine.unfold("sum", {"tokens": [1, 2, 3]})
        ids = [f"r{k}" for k in range(count)]
        future = engine.submit_many("sum", [unfolded] * count, ids=ids)
        engine.engine.turn(0.0)
        future.cancel()
        start = time.thread_time()
        while engine.engine.has_work():
            engine.engine.turn(0.0)
        spent = time.thread_time() - start
        assert balanced(engine)
        return spent

    few = min(seconds(1_000) for _ in range(3))
    assert seconds(16_000) < 80 * few


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), SystemExit(3)])
def test_a_callback_that_raises_ends_its_request_only(engine: CellEngine, error: BaseException) -> None:
    seen: list[Any] = []

    def on_step(name: str, value: Any) -> None:
        seen.append(value)
        if len(seen) == 2:
            raise error

    bad = engine.submit("write", {"tokens": [1], "limit": 50_000}, on_step=on_step)
    good = engine.submit("write", {"tokens": [3, 4], "limit": 6}, on_step=lambda name, value: None)
    engine._driver.drive()
    with pytest.raises(RequestError, match=f"on_step raised {type(error).__name__}"):
        bad.result(0)
    assert len(seen) == 2
    assert len(good.result(0)["tokens"]) <= 6
    assert balanced(engine)
