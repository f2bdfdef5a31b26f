"""CellEngine: serves models of cells. It joins `cells/`, which unfolds requests, `schedule/cells` and a runtime.

engine = CellEngine([model], runtime)
engine.run("classifier", [{"tokens": [3, 1, 4]}, {"tokens": [1, 5]}])     # in this thread
engine.start()                                                            # or in a thread of its own
engine.submit("classifier", {"tokens": [3, 1, 4]}).result()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cellar.cells.model import CellModel, UnfoldedRequest
from cellar.core.cell_graphs import CellConfig, CellOutput, CellRequest, CellStats
from cellar.core.errors import CellarError, ConfigError, DeviceError, RequestError
from cellar.core.tasks import TaskPlan, TaskResult
from cellar.engine.cell_front import CellFront, OnStep
from cellar.engine.client import Message
from cellar.engine.driver import Driver
from cellar.engine.engine import Engine
from cellar.runtime.cells.protocol import CellRuntime
from cellar.schedule.cells.scheduler import CellScheduler

Clock = Callable[[], float]


@dataclass(slots=True)
class CellPart:
    """One part of a streamed response: new values by name, and with the last part the whole response."""

    values: dict[str, Any] = field(default_factory=dict)
    response: Any = None
    last: bool = False


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
        self.engine: Engine[CellRequest, TaskPlan, TaskResult, CellOutput, CellStats] = Engine(
            self.scheduler,
            runtime,
            CellOutput.refusal,
            run_ahead=self.scheduler.run_ahead,
            clock=clock,
            check_seconds=check_seconds,
        )
        self.front = CellFront(self.engine, self._post)
        self._driver = Driver(self.engine, self.front.turn, self._end, "cellar-cells")
        self._index = {name: m for m, name in enumerate(names)}
        self._ids = count()

    @classmethod
    def open(
        cls,
        models: Sequence[CellModel],
        devices: Sequence[str] = ("auto",),
        config: CellConfig | None = None,
        **options: Any,
    ) -> CellEngine:
        """An engine with a runtime in this process, a worker per device; `options` as `LocalCellRuntime` takes them."""
        from cellar.runtime.cells.local import LocalCellRuntime

        specs, modules = [model.spec for model in models], [model.modules for model in models]
        runtime = LocalCellRuntime(specs, modules, devices, **options)
        return cls(models, runtime, config)

    @property
    def running(self) -> bool:
        """True between `start` and `close`, unless the loop has failed."""
        return self._driver.started and self._driver.ended is None

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
        return self.front.start(id or f"cells-{next(self._ids)}", self._index[model], unfolded, on_step)

    def submit_many(
        self, model: str, unfolded: Sequence[UnfoldedRequest], *, ids: Sequence[str] | None = None
    ) -> Future[list[Any]]:
        """Start many requests at once -> a future of all responses, in their order, with an error where one failed.

        Costs a request a tenth of what `submit_unfolded` does. To cancel the future is to abort those that run.
        """
        self._check_alive()
        if ids is None:
            group = next(self._ids)
            ids = [f"cells-{group}-{k}" for k in range(len(unfolded))]
        return self.front.start_all(list(ids), self._index[model], unfolded)

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
        if not self._driver.started:
            self._driver.drive()
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
        self.front.abort(request_id)

    def finish(self, request_id: str, num_steps: int) -> None:
        """End the growing chains of a request after at most so many steps, and answer."""
        self.front.finish(request_id, num_steps)

    def stats(self) -> CellStats:
        """A snapshot."""
        return self.scheduler.stats()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the loop in a thread until `close`."""
        self._driver.start()

    def close(self) -> None:
        """Stop; open requests get a DeviceError, and the device's memory is free."""
        self._driver.close()
        self.engine.close()

    def __enter__(self) -> CellEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how --------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Have something done by the engine's thread; if it has ended, all that is open ends."""
        try:
            self._driver.post(message)
        except CellarError:
            self._end(self._driver.ended or DeviceError("the engine was closed."))

    def _end(self, error: BaseException) -> None:
        self.front.fail_all(_stopped(error))

    def _check_alive(self) -> None:
        if self._driver.ended is not None:
            raise _stopped(self._driver.ended)


def _stopped(error: BaseException) -> DeviceError:
    return DeviceError(f"the engine has stopped: {error}")
