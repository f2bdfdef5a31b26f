"""CellFront: requests of cells in, their answers out. Everything between a user's fields and the engine's graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cellar.cells.model import UnfoldedRequest
from cellar.cells.response import Layout
from cellar.core.cell_graphs import CellOutput, CellRequest, CellResults, CellStats, CellStep
from cellar.core.errors import CellarError, RequestError
from cellar.engine.client import EngineClient

logger = logging.getLogger(__name__)

OnStep = Callable[[str, Any], None]
CellClient = EngineClient[CellRequest, CellOutput, CellStats]


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


class CellFront:
    """The requests whose answers somebody waits for. What it asks of the engine is asked by `post`, in any thread.

    `deliver` and the messages belong to the engine's thread.
    """

    def __init__(self, engine: CellClient, post: Callable[[Callable[[], None]], None]) -> None:
        self._engine = engine
        self._post = post
        self._open: dict[str, _Open | _Together] = {}

    def start(self, id: str, model: int, unfolded: UnfoldedRequest, on_step: OnStep | None) -> Future[Any]:
        """Start a request -> a future of its response. Raises RequestError if its id is in use."""
        if id in self._open:
            raise RequestError(f"request {id!r} is already running; give each its own id.", "id")
        future: Future[Any] = Future()
        self._open[id] = _Open(unfolded.layout, future, on_step)
        self._begin((id,), [unfolded.request(id, model, stream=on_step is not None)], future)
        return future

    def start_all(self, ids: Sequence[str], model: int, unfolded: Sequence[UnfoldedRequest]) -> Future[list[Any]]:
        """Start many -> a future of all responses, in their order. Raises RequestError if ids are in use."""
        if len(set(ids)) < len(ids) or not self._open.keys().isdisjoint(ids):
            raise RequestError("requests have equal ids, or ids of requests that run; give each its own.", "id")
        together = _Together(ids, [one.layout for one in unfolded])
        if not ids:
            together.future.set_result([])
            return together.future
        self._open.update(dict.fromkeys(ids, together))
        requests = [one.request(id, model) for id, one in zip(ids, unfolded, strict=True)]
        self._begin(ids, requests, together.future)
        return together.future

    def abort(self, request_id: str) -> None:
        """Drop a request, and those that were started together with it; their future is cancelled."""
        found = self._open.get(request_id)
        if found is not None:
            found.future.cancel()

    def finish(self, request_id: str, num_steps: int) -> None:
        """End the growing chains of a request after at most so many steps, and answer."""
        self._post(lambda: self._engine.finish(request_id, num_steps))

    def turn(self) -> None:
        """One turn of the engine."""
        self.deliver(self._engine.turn(None))

    def deliver(self, outputs: Sequence[CellOutput]) -> None:
        """Answer who waits."""
        for output in outputs:
            for step in output.steps:
                found = self._open.get(step.id)
                if found is not None:
                    self._step(step, found)
            for id, results in output.finished:
                found = self._open.pop(id, None)
                if found is not None:
                    found.answer(id, results)
            for id, reason in output.failed:
                found = self._open.pop(id, None)
                if found is not None:
                    found.fail(id, RequestError(reason))

    def fail_all(self, error: CellarError) -> None:
        """Nobody will be answered any more."""
        while self._open:
            with suppress(KeyError):
                id, found = self._open.popitem()
                found.fail(id, error)

    def _begin(self, ids: Sequence[str], requests: Sequence[CellRequest], future: Future[Any]) -> None:
        future.add_done_callback(lambda done: self._dropped(ids, done))
        self._post(lambda: self._engine.add(*requests))

    def _step(self, step: CellStep, found: _Open | _Together) -> None:
        """Whatever a user's callback raises ends its own request."""
        try:
            found.step(step)
        except (Exception, SystemExit) as error:
            logger.error("request %s: on_step has failed", step.id, exc_info=error)
            del self._open[step.id]
            found.fail(step.id, RequestError(f"on_step raised {type(error).__name__}: {error}"))
            self._engine.abort(step.id)

    def _dropped(self, ids: Sequence[str], future: Future[Any]) -> None:
        """A future has ended; if by its owner, its requests are dropped."""
        if future.cancelled():
            dropped = [id for id in ids if self._open.pop(id, None) is not None]
            if dropped:
                self._post(lambda: self._abort(dropped))

    def _abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._engine.abort(id)
