"""Pool: several engines as one `StepClient`. A stream whose engine is lost, or drains, goes on at another one.

    Front -- add, finish, abort --> Pool --> RemoteEngine ~~~ engine A    joins, drains, is lost
          <-- outputs of a turn ---      --> RemoteEngine ~~~ engine B

The next engine gets the prompt and what was delivered, and goes on as if it had made that itself: nothing is sent
twice, nothing is missing, and sampling is a function of seed and output index, so the tokens are those of an
undisturbed run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, MemoryAnswer, MemoryQuestion, Request, SchedulerStats, StepOutput
from cellar.engine.client import Message
from cellar.engine.engine import Mailbox
from cellar.server.bell import Bell
from cellar.server.endpoint import Address
from cellar.server.pool.history import History
from cellar.server.pool.stream import Stream, told_once
from cellar.server.pool.totals import NOTHING, merged, past, summed
from cellar.server.remote import RemoteEngine
from cellar.server.wire import Reported

logger = logging.getLogger(__name__)

MAX_LOST = 5
"""Engines that may go down with one request; it might be the request."""

PATIENCE_SECONDS = 120.0
"""How long a stream waits for an engine while there is none."""


@dataclass(slots=True, eq=False)
class Place:
    """An engine of the pool, and the requests that it has; `draining` ones get no more."""

    address: Address
    engine: RemoteEngine
    streams: dict[str, Stream[Place]] = field(default_factory=dict)
    history: History = field(default_factory=History)
    draining: bool = False

    def take(self, stream: Stream[Place]) -> None:
        """A stream runs here from now on."""
        stream.place, stream.since, stream.begun = self, self.history.now, None
        self.streams[stream.request.id] = stream


class Chooser(Protocol):
    """Who gets a request."""

    def choose(self, request: Request, places: Sequence[Place]) -> Place:
        """One of `places`, of which there is at least one. It is given to that one next."""

    def joined(self, place: Place) -> None:
        """It is in the pool from now on. May raise CellarError if its engine is gone already."""

    def gone(self, place: Place) -> None:
        """It is in the pool no more."""

    def reported(self, place: Place, reported: Reported) -> None:
        """What an engine says of itself, if the chooser wanted that."""

    def started(self, request_id: str) -> None:
        """A request's first token has come; it may not have been chosen for: its sibling was."""

    def ended(self, request_id: str, num_output: int) -> None:
        """A request has ended after about so many tokens, if it was chosen for."""


@dataclass(slots=True)
class _Question:
    """What was asked of all engines; `open` are those that have not answered. `error`: one cannot any more.

    An engine that is lost has no memory that anybody could use, but what it was to forget may lie in tiers that outlive
    it: whoever asked must ask again.
    """

    question: MemoryQuestion
    then: Callable[[MemoryAnswer | CellarError], None]
    open: set[int]
    answers: list[MemoryAnswer] = field(default_factory=list)
    error: CellarError | None = None

    def lost(self, key: int) -> None:
        """An engine is gone."""
        if key in self.open:
            self.open.discard(key)
            if self.question.forget:
                self.error = CellarError("an engine was lost before it had forgotten; ask again.")

    def answer(self) -> MemoryAnswer | CellarError:
        """What all of them said."""
        if self.error is None and not self.answers:
            return CellarError("there is no engine that could say it; ask again.")
        return self.error or merged(self.answers, len(self.question.conversations))


class Pool:
    """Belongs to the thread that calls `turn`; `post`, `stats` and `wake` are for all. It begins without an engine.

    `migrated` is told how many sequences go on elsewhere.
    """

    def __init__(
        self,
        chooser: Chooser,
        clock: Callable[[], float] = time.monotonic,
        max_lost: int | None = None,
        migrated: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._chooser = chooser
        self._max_lost = max_lost
        self._migrated = migrated
        self._clock = clock
        self._places: list[Place] = []
        self._streams: dict[str, Stream[Place]] = {}
        self._homeless: dict[str, float] = {}  # since when; who has waited longest comes first
        self._refused: dict[str, str] = {}
        self._questions: list[_Question] = []
        self._past: dict[Address, SchedulerStats] = {}
        self._bell = Bell()
        self._mailbox = Mailbox(self.wake)

    # -- engines ----------------------------------------------------------------------------------

    @property
    def places(self) -> Sequence[Place]:
        """The engines that are connected."""
        return tuple(self._places)

    def join(self, address: Address, engine: RemoteEngine) -> None:
        """An engine is there; who waits for one goes there, and so do streams of engines that drain."""
        place = Place(address, engine)
        self._places.append(place)
        self._bell.listen(engine.connection)
        with self._losing(place):
            self._chooser.joined(place)
        for id in list(self._homeless):
            del self._homeless[id]
            self._settle(self._streams[id])
        for place in self._places:
            if place.draining:
                self._move_out(place)

    def drain(self, address: Address) -> None:
        """An engine gets no more requests, and what it has goes on elsewhere, if there is an elsewhere."""
        for place in self._places:
            if place.address == address and not place.draining:
                place.draining = True
                self._move_out(place)

    # -- StepClient -------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Have something done by the owner's thread at its next turn; ends a waiting one."""
        self._mailbox.post(message)

    def read(self) -> None:
        """Do what was posted."""
        self._mailbox.read()

    def wake(self) -> None:
        """End a waiting `turn`."""
        self._bell.ring()

    def add(self, *requests: Request) -> None:
        """Queue requests; siblings go to one engine. Where there is no engine they wait for one."""
        place: Place | None = None
        for request in requests:
            if request.id in self._streams:
                self._refused[request.id] = f"A request with the id {request.id!r} is running; use another id."
                continue
            stream = self._streams[request.id] = Stream[Place](request)
            place = self._settle(stream, place)

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End a request after `num_tokens` output tokens; later ones are void."""
        if (place := self._forget(request_id, num_tokens)) is not None:
            with self._losing(place):
                place.engine.finish(request_id, num_tokens, reason)

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown ids are ignored."""
        self._refused.pop(request_id, None)
        if (place := self._forget(request_id)) is not None:
            with self._losing(place):
                place.engine.abort(request_id)

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer | CellarError], None]) -> None:
        """Ask all engines; the answer comes with a later turn, when all have answered that are still there."""
        asked = _Question(question, then, {id(place) for place in self._places})
        self._questions.append(asked)
        for place in self.places:

            def heard(answer: MemoryAnswer | CellarError, key: int = id(place)) -> None:
                asked.open.discard(key)
                if isinstance(answer, CellarError):
                    asked.error = answer
                else:
                    asked.answers.append(answer)

            with self._losing(place):
                place.engine.memory(question, heard)

    def refused(self) -> Mapping[str, str]:
        """Requests that could never run and of which no turn has told yet, as far as engines have answered."""
        refused = dict(self._refused)
        for place in self.places:
            with self._losing(place):
                refused |= place.engine.refused()
        return refused

    def turn(self, timeout: float | None = None) -> list[StepOutput]:
        """What has come; waits up to `timeout` seconds (None: for ever) for something, or for a message."""
        self.read()
        outputs = self._collect()
        if not outputs and not self._answered():
            self._wait(timeout)
            outputs = self._collect()
            self._answered()
        return outputs

    def has_work(self) -> bool:
        """True while a request has not ended, a question is open, or a message is unread."""
        return bool(len(self._mailbox) or self._streams or self._refused or self._questions)

    def stats(self) -> SchedulerStats:
        """The sum of what engines said last."""
        return summed([*self._past.values(), *(place.engine.stats() for place in self.places)])

    def stats_at(self, address: Address) -> SchedulerStats | None:
        """What the engine there said last, with what those before it there have counted; None while there is none."""
        for place in self.places:
            if place.address == address:
                return summed([self._past.get(address, NOTHING), place.engine.stats()])
        return None

    def close(self) -> None:
        """Leave all engines, which drop what was running; a second call does nothing."""
        for place in self._places:
            place.engine.close()
        self._places.clear()
        self._bell.close()

    # -- how --------------------------------------------------------------------------------------

    def _collect(self) -> list[StepOutput]:
        outputs = []
        self._give_up()
        for place in self.places:
            if place not in self._places:
                continue  # lost meanwhile, when it was to go on with what another had
            try:
                outputs += [self._seen(place, output) for output in place.engine.take()]
                told, place.engine.reported = place.engine.reported, []
                for reported in told:
                    self._chooser.reported(place, reported)
            except CellarError as error:
                self._lose(place, error)
        if self._refused:
            outputs.append(StepOutput.refusal(self._refused))
            self._refused = {}
        return outputs

    def _seen(self, place: Place, output: StepOutput) -> StepOutput:
        """Note what is about to be delivered."""
        place.history.add(output.ids, output.tokens, place.streams)
        if output.num_cached_tokens or output.prompt_logprobs:
            for id in {*output.prompt_logprobs, *output.num_cached_tokens}:
                stream = place.streams[id]
                if stream.begun is None:
                    stream.begun = place.history.now - 1
                    self._chooser.started(id)
                told_once(output, id, stream)
        for id in output.finished:
            self._forget(id)
        return output

    def _wait(self, timeout: float | None) -> None:
        if self._homeless:
            left = next(iter(self._homeless.values())) + PATIENCE_SECONDS - self._clock()
            timeout = max(0.0, left if timeout is None else min(left, timeout))
        self._bell.wait(timeout)
        self.read()

    def _answered(self) -> bool:
        """Pass on answers that are complete; whether there were any."""
        if not self._questions:
            return False
        done = [asked for asked in self._questions if not asked.open]
        self._questions = [asked for asked in self._questions if asked.open]
        for asked in done:
            asked.then(asked.answer())
        return bool(done)

    def _settle(self, stream: Stream[Place], place: Place | None = None) -> Place | None:
        """Give a stream to an engine, to `place` if that may be; -> where it is now."""
        while True:
            open = [one for one in self._places if not one.draining]
            if not open:
                self._homeless.setdefault(stream.request.id, self._clock())
                return None
            if place not in open:
                place = self._chooser.choose(stream.request, open)
            place.take(stream)
            try:
                place.engine.add(stream.onward())
                return place
            except CellarError as error:
                del place.streams[stream.request.id]
                stream.place = None
                self._lose(place, error)

    def _move_out(self, place: Place) -> None:
        """What an engine has goes on elsewhere, unless there is nobody else."""
        if not any(not other.draining for other in self._places):
            return
        place.history.deal(place.streams)
        moved = list(place.streams.values())
        place.streams.clear()
        for stream in moved:
            stream.place = None
            with self._losing(place):
                place.engine.abort(stream.request.id)
        for stream in moved:
            self._settle(stream)
        if moved:
            self._migrated(len(moved))
            logger.warning("an engine drains; its %d sequences go on elsewhere", len(moved))

    def _lose(self, place: Place, error: CellarError) -> None:
        """An engine is gone: what it had goes on elsewhere."""
        if place not in self._places:
            return
        self._places.remove(place)
        self._bell.ignore(place.engine.connection)
        place.history.deal(place.streams)
        before = self._past.get(place.address, NOTHING)
        self._past = {**self._past, place.address: summed([before, past(place.engine.stats())])}  # others read it
        place.engine.close()
        self._chooser.gone(place)
        for asked in self._questions:
            asked.lost(id(place))
        level = logging.INFO if place.draining else logging.ERROR
        logger.log(level, "an engine is lost (%s); its %d sequences go on elsewhere", error, len(place.streams))
        for id_, stream in place.streams.items():
            stream.place, stream.lost = None, stream.lost + 1
            if stream.lost >= (self._max_lost or MAX_LOST):
                del self._streams[id_]
                self._chooser.ended(id_, 0)
                self._refused[id_] = f"the engine was lost {stream.lost} times with this request; send it again."
        onward = [stream for id_, stream in place.streams.items() if id_ in self._streams]
        for stream in onward:
            self._settle(stream)
        if onward:
            self._migrated(len(onward))

    @contextlib.contextmanager
    def _losing(self, place: Place) -> Iterator[None]:
        """What is done with an engine may show that it is gone."""
        try:
            yield
        except CellarError as error:
            self._lose(place, error)

    def _forget(self, id: str, num_output: int | None = None) -> Place | None:
        """-> where it ran. Who does not say how much its answer is takes a token for each frame since it began."""
        stream = self._streams.pop(id, None)
        self._homeless.pop(id, None)
        if stream is None or stream.place is None:
            return None
        if num_output is None:
            num_output = 0 if stream.begun is None else stream.place.history.now - stream.begun
        self._chooser.ended(id, num_output)
        stream.place.streams.pop(id, None)
        return stream.place

    def _give_up(self) -> None:
        """End streams that have waited for an engine for too long."""
        if not self._homeless:
            return
        now = self._clock()
        for id in list(takewhile(lambda id: now >= self._homeless[id] + PATIENCE_SECONDS, self._homeless)):
            self._forget(id)
            self._refused[id] = f"there was no engine for {PATIENCE_SECONDS:.0f} s; send it again."
