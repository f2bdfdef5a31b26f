"""CellEngine: serves models of cells. It joins `cells/`, which unfolds requests, `schedule/cells.py` and a runtime.

engine = CellEngine([model], runtime)
engine.run("classifier", [{"tokens": [3, 1, 4]}, {"tokens": [1, 5]}])     # in this thread
engine.start()                                                            # or in a thread of its own
engine.submit("classifier", {"tokens": [3, 1, 4]}).result()
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cellar.cells.model import CellModel, UnfoldedRequest
from cellar.cells.response import Layout
from cellar.core.cell_graphs import CellConfig, CellOutput, CellRequest, CellResults, CellStats, CellStep
from cellar.core.errors import CellarError, ConfigError, DeviceError, RequestError
from cellar.core.tasks import TaskPlan, TaskResult
from cellar.loop import Loop, Mailbox
from cellar.runtime.cell_protocol import CellRuntime
from cellar.schedule.cells import CellScheduler

Clock = Callable[[], float]
OnStep = Callable[[str, Any], None]


class CellLoop:
    """The loop alone, in the thread that calls `turn`: compiled requests in, `CellOutput`s out.

    `add` and `abort` may be called from any thread. A request that could never run comes back as failed.
    """

    def __init__(
        self,
        scheduler: CellScheduler,
        runtime: CellRuntime,
        *,
        clock: Clock = time.monotonic,
        check_seconds: float = 60.0,
    ) -> None:
        self.scheduler = scheduler
        self.runtime = runtime
        self._clock = clock
        self._mailbox: Mailbox[Callable[[CellOutput], None]] = Mailbox(runtime.wake)
        self._loop: Loop[TaskPlan, TaskResult, CellOutput] = Loop(scheduler, runtime, self, clock, check_seconds)

    def add(self, requests: Sequence[CellRequest]) -> None:
        """Queue requests."""
        self._mailbox.post(lambda refused: self._admit(requests, refused))

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self._mailbox.post(lambda _: self.scheduler.abort(request_id))

    def finish(self, request_id: str, num_steps: int) -> None:
        """End the growing chains of a request after at most so many steps."""
        self._mailbox.post(lambda _: self.scheduler.finish(request_id, num_steps))

    def wake(self) -> None:
        """End a waiting `turn` from another thread."""
        self.runtime.wake()

    def turn(self, timeout: float | None = None) -> list[CellOutput]:
        """One turn of the loop; waits up to `timeout` seconds (None: for ever) for a result, or for a `wake`."""
        return self._loop.turn(timeout, self.scheduler.run_ahead)

    def has_work(self) -> bool:
        """True while a request waits or runs, or a message is unread."""
        return bool(len(self._mailbox)) or self.scheduler.has_work()

    # -- what the loop asks -----------------------------------------------------------------------

    def received(self) -> list[CellOutput]:
        """Read the mailbox."""
        refused = CellOutput()
        for letter in self._mailbox.read():
            self._loop.stir()
            letter(refused)
        late = self.scheduler.late()
        return [output for output in (refused, late) if output.failed or output.finished]

    def submitted(self, plan: TaskPlan) -> None:
        """Nothing is to be done after a submit."""

    def committed(self, result: TaskResult) -> CellOutput | None:
        """-> what the result delivers, or None."""
        output = self.scheduler.commit(result, self._clock())
        return output if output.finished or output.failed or output.steps else None

    def _admit(self, requests: Sequence[CellRequest], refused: CellOutput) -> None:
        refused.failed += self.scheduler.add_all(requests, self._clock())


@dataclass(slots=True)
class CellPart:
    """One part of a streamed response: new values by name, and with the last part the whole response."""

    values: dict[str, Any] = field(default_factory=dict)
    response: Any = None
    last: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose answer somebody waits for."""

    layout: Layout
    future: Future[Any]
    on_step: OnStep | None

    def answer(self, _: str, results: CellResults) -> None:
        """It has been computed."""
        try:
            response = self.layout.assemble(results)
        except Exception as error:
            self.fail(_, error)
            return
        with suppress(InvalidStateError):
            self.future.set_result(response)

    def fail(self, _: str, error: Exception) -> None:
        """It has not."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def step(self, step: CellStep) -> None:
        """A step of a growing chain."""
        name = self.layout.grown.get((step.part, step.output, step.ordinal))
        if name is not None and self.on_step is not None:
            value = step.value
            self.on_step(name, value.item() if value.ndim == 0 else value)


class _Together:
    """Requests that were submitted with one call, and are answered with one future."""

    __slots__ = ("_answers", "_layouts", "_left", "_places", "future")

    def __init__(self, ids: Sequence[str], layouts: list[Layout]) -> None:
        self.future: Future[list[Any]] = Future()
        self._places = dict(zip(ids, range(len(ids)), strict=True))
        self._layouts = layouts
        self._answers: list[Any] = [None] * len(ids)
        self._left = len(ids)

    def answer(self, id: str, results: CellResults) -> None:
        """One has been computed."""
        place = self._places[id]
        try:
            response = self._layouts[place].assemble(results)
        except Exception as error:
            response = error
        self._put(place, response)

    def fail(self, id: str, error: Exception) -> None:
        """One has not."""
        self._put(self._places[id], error)

    def step(self, step: CellStep) -> None:
        """Nobody listens."""

    def _put(self, place: int, answer: Any) -> None:
        self._answers[place] = answer
        self._left -= 1
        if not self._left:
            with suppress(InvalidStateError):
                self.future.set_result(self._answers)


class CellEngine:
    """Serves several models with one scheduler and one runtime.

    The runtime was made for `[model.spec for model in models]`, in this order. `run` drives the loop in the calling
    thread; after `start` a thread does, and `submit` and `stream` may be called from any thread. A request that fails
    gets a RequestError; no other request notices. If the loop itself fails all open requests get a DeviceError.
    """

    def __init__(
        self,
        models: Sequence[CellModel],
        runtime: CellRuntime,
        config: CellConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        check_seconds: float = 60.0,
    ) -> None:
        names = [model.name for model in models]
        if not models or len(set(names)) != len(names):
            raise ConfigError(f"models have names {names}; give one or more, with different names.")
        self.models = {model.name: model for model in models}
        self.runtime = runtime
        self.scheduler = CellScheduler([model.spec for model in models], runtime.capacity, config)
        self.loop = CellLoop(self.scheduler, runtime, clock=clock, check_seconds=check_seconds)
        self._index = {name: m for m, name in enumerate(names)}
        self._ids = count()
        self._open: dict[str, _Open | _Together] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: BaseException | None = None

    @classmethod
    def open(
        cls,
        models: Sequence[CellModel],
        devices: Sequence[str] = ("auto",),
        config: CellConfig | None = None,
        **options: Any,
    ) -> CellEngine:
        """An engine with a runtime in this process, a worker per device; `options` as `LocalCellRuntime` takes them."""
        from cellar.runtime.cells import LocalCellRuntime

        specs, modules = [model.spec for model in models], [model.modules for model in models]
        runtime = LocalCellRuntime(specs, modules, devices, **options)
        return cls(models, runtime, config)

    @property
    def running(self) -> bool:
        """True between `start` and `close`, unless the loop has failed."""
        return self._thread is not None and self._broken is None and not self._closing

    # -- requests ---------------------------------------------------------------------------------

    def unfold(self, model: str, fields: Mapping[str, Any]) -> UnfoldedRequest:
        """The graph of a request. Runs the user's function, in this thread. Raises RequestError."""
        if model not in self.models:
            raise RequestError(f"there is no model {model!r}; there are {list(self.models)}.", "model")
        return self.models[model].unfold(fields)

    def submit(
        self, model: str, fields: Mapping[str, Any], *, id: str | None = None, on_step: OnStep | None = None
    ) -> Future[Any]:
        """Start a request -> a future of its response; to cancel the future is to abort the request.

        `on_step(name, value)` is called, in the engine's thread, for every step of a growing value of that name.
        Raises RequestError if the request cannot be unfolded.
        """
        return self.submit_unfolded(model, self.unfold(model, fields), id=id, on_step=on_step)

    def submit_unfolded(
        self, model: str, unfolded: UnfoldedRequest, *, id: str | None = None, on_step: OnStep | None = None
    ) -> Future[Any]:
        """As `submit`, for a request that `unfold` has made."""
        self._check_alive()
        name = id if id is not None else f"cells-{next(self._ids)}"
        if name in self._open:
            raise RequestError(f"request {name!r} runs already; give each its own id.", "id")
        future: Future[Any] = Future()
        self._open[name] = _Open(unfolded.layout, future, on_step)
        future.add_done_callback(lambda done: self._dropped((name,), done))
        self.loop.add([unfolded.request(name, self._index[model], stream=on_step is not None)])
        self._answer_if_stopped()
        return future

    def submit_many(
        self, model: str, unfolded: Sequence[UnfoldedRequest], *, ids: Sequence[str] | None = None
    ) -> Future[list[Any]]:
        """Start many requests at once -> a future of all responses, in their order, with an error where one failed.

        Costs a request a tenth of what `submit_unfolded` does. To cancel the future is to abort those that run.
        """
        self._check_alive()
        if ids is None:
            group = next(self._ids)
            names = [f"cells-{group}-{k}" for k in range(len(unfolded))]
        else:
            names = list(ids)
            if len(set(names)) < len(unfolded) or not self._open.keys().isdisjoint(names):
                raise RequestError("requests have equal ids, or ids of requests that run; give each its own.", "id")
        together = _Together(names, [one.layout for one in unfolded])
        future = together.future
        if not names:
            future.set_result([])
            return future
        self._open.update(dict.fromkeys(names, together))
        future.add_done_callback(lambda done: self._dropped(names, done))
        m = self._index[model]
        self.loop.add([one.request(name, m) for name, one in zip(names, unfolded, strict=True)])
        self._answer_if_stopped()
        return future

    async def stream(self, model: str, fields: Mapping[str, Any], *, id: str | None = None) -> AsyncIterator[CellPart]:
        """Parts of a response as they are computed; the last holds all of it. Leaving early aborts the request.

        The engine's thread must run (`start`). Unfolding happens in a thread beside the event loop.
        """
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[CellPart | None] = asyncio.Queue()

        def on_step(name: str, value: Any) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, CellPart({name: value}))

        unfolded = await asyncio.to_thread(self.unfold, model, fields)
        future = self.submit_unfolded(model, unfolded, id=id, on_step=on_step)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(parts.put_nowait, None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield CellPart(response=future.result(), last=True)
        finally:
            future.cancel()

    def run(self, model: str, requests: Sequence[Mapping[str, Any]], *, raise_errors: bool = True) -> list[Any]:
        """The responses of some requests, in their order.

        A request that fails raises its error, or with `raise_errors` False gives it in place of the response, so that
        the others are not lost.
        """
        found: list[Any] = [None] * len(requests)
        places: list[int] = []
        unfolded: list[UnfoldedRequest] = []
        for k, fields in enumerate(requests):
            try:
                unfolded.append(self.unfold(model, fields))
            except CellarError as error:
                found[k] = error
            else:
                places.append(k)
        future = self.submit_many(model, unfolded)
        if self._thread is None:
            self._drive()
        for k, answer in zip(places, future.result(), strict=True):
            found[k] = answer
        for answer in found:
            if isinstance(answer, Exception) and (raise_errors or not isinstance(answer, CellarError)):
                raise answer
        return found

    def abort(self, request_id: str) -> None:
        """Drop a request, and those that were submitted together with it; their future is cancelled.

        Unknown ids are ignored.
        """
        found = self._open.get(request_id)
        if found is not None:
            found.future.cancel()

    def finish(self, request_id: str, num_steps: int) -> None:
        """End the growing chains of a request after at most so many steps, and answer."""
        self.loop.finish(request_id, num_steps)

    def stats(self) -> CellStats:
        """A snapshot."""
        return self.scheduler.stats()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the loop in a thread until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="cellar-cells", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; open requests get a DeviceError, and the device's memory is free."""
        self._closing = True
        self.loop.wake()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._broken = self._broken or DeviceError("the engine was closed.")
        self._fail_all(DeviceError("the engine was closed."))
        self.runtime.close()

    def __enter__(self) -> CellEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop's side --------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._deliver(self.loop.turn(None))
        except BaseException as error:
            self._broken = error
            self._fail_all(DeviceError(f"the engine has stopped: {error}"))
            if not isinstance(error, Exception):
                raise

    def _drive(self) -> None:
        try:
            while self.loop.has_work():
                self._deliver(self.loop.turn(None))
        except BaseException as error:
            self._broken = error
            self._fail_all(DeviceError(f"the engine has stopped: {error}"))
            raise

    def _deliver(self, outputs: Sequence[CellOutput]) -> None:
        for output in outputs:
            for step in output.steps:
                found = self._open.get(step.id)
                if found is not None:
                    found.step(step)
            for id, results in output.finished:
                found = self._open.pop(id, None)
                if found is not None:
                    found.answer(id, results)
            for id, reason in output.failed:
                found = self._open.pop(id, None)
                if found is not None:
                    found.fail(id, RequestError(reason))

    def _dropped(self, ids: Sequence[str], future: Future[Any]) -> None:
        """A future has ended; if by its owner, its requests are dropped."""
        if future.cancelled():
            for id in ids:
                if self._open.pop(id, None) is not None:
                    self.loop.abort(id)

    def _answer_if_stopped(self) -> None:
        """The loop may have stopped just before a request came, and then nobody else would answer."""
        try:
            self._check_alive()
        except DeviceError as error:
            self._fail_all(error)

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise DeviceError(f"the engine has stopped: {self._broken}")

    def _fail_all(self, error: CellarError) -> None:
        while self._open:
            with suppress(KeyError):
                id, found = self._open.popitem()
                found.fail(id, error)
