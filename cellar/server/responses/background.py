"""Responses that are made while nobody waits: begun, followed by their events, cancelled, ended with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import Enum, auto

from cellar.conversations import events as kept
from cellar.conversations import responses
from cellar.conversations.errors import Ended, NotFound, StoreError
from cellar.conversations.records import Event as KeptEvent
from cellar.conversations.records import Response, Status
from cellar.conversations.session import Session as StoreSession
from cellar.conversations.store import AsyncStore
from cellar.server.desk import Session
from cellar.server.responses.answer import Answer, Event
from cellar.server.responses.making import Maker, begin_turn, let_go
from cellar.server.responses.past import Past
from cellar.server.responses.records import record_of, records_of, shown_response, stored_body
from cellar.server.responses.running import events_of, failed
from cellar.server.responses.turns import Turn
from cellar.server.stream import named_event

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How often it is asked whether another front has cancelled what is made here."""

FOLLOW_SECONDS = 0.2
"""How often events are looked for that another front makes."""

_LAST = ("response.completed", "response.incomplete", "response.failed")
_LAST_FRAMES = tuple(f"event: {kind}\n".encode() for kind in _LAST)


class _Why(Enum):
    """Why a response is made no further."""

    CANCELLED = auto()  # here: the store does not know yet
    ENDED = auto()  # the store knows


class Background:
    """The responses that this process makes in the background. One event loop; `close` it before the store."""

    def __init__(self, maker: Maker, store: AsyncStore, deadline: float | None) -> None:
        self._maker = maker
        self._store = store
        self._deadline = deadline
        self._made: dict[str, asyncio.Task[None]] = {}
        self._whys: dict[str, _Why] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self, turn: Turn, answer: Answer, name: str) -> None:
        """Begin to make a response; it is stored when this returns. Raises RequestError, ApiError, StoreError."""
        session = await self._maker.open(turn, name)
        first = [_kept(event) for event in answer.begin(queued=True)] if turn.request.stream else []
        try:
            await self._store.write(_begin, record_of(turn, answer.body), turn.past, first)
        except BaseException:
            let_go(self._store, turn)
            async with session:
                raise
        self._news[turn.id] = asyncio.Event()
        self._made[turn.id] = asyncio.create_task(self._make(turn, answer, session, name))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def cancel(self, owner: str, id: str) -> Response:
        """Make a response no further, wherever that is done; -> it as it is now. Raises NotFound, StoreError."""
        made = self._made.get(id)
        if made is not None:
            await self._store.read(responses.get, owner, id)  # another's is not there
            self._stop(id, _Why.CANCELLED)
            await asyncio.wait((made,))
        return await self._store.write(responses.cancel, owner, id)

    async def follow(self, owner: str, id: str, after: int) -> AsyncGenerator[bytes, None]:
        """The events behind the one with this number, as they are made. Raises NotFound."""
        number = after
        while True:
            news = self._news.get(id)
            found = await self._store.read(kept.after, owner, id, number)
            for one in found.events:
                number = one.number
                yield one.data
                if one.data.startswith(_LAST_FRAMES):
                    return
            if found.events:
                continue
            if not found.status.running:
                if found.status is Status.FAILED:  # its process died, and could not say so
                    body = shown_response(await self._store.read(responses.get, owner, id))
                    last = {"type": "response.failed", "response": body, "sequence_number": number + 1}
                    yield named_event(last)
                return
            if news is None:
                await asyncio.sleep(FOLLOW_SECONDS)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), WATCH_SECONDS)

    async def streams(self, owner: str, id: str) -> bool:
        """True if there are events to follow. Raises NotFound."""
        return bool((await self._store.read(kept.after, owner, id, limit=1)).events)

    async def close(self) -> None:
        """End what is being made; it has failed."""
        for task in self._made.values():
            task.cancel()
        if self._made:
            await asyncio.wait(self._made.values())
        if self._watching is not None:
            self._watching.cancel()

    async def _make(self, turn: Turn, answer: Answer, session: Session, name: str) -> None:
        log = _Log(self._store, turn, self._tell) if turn.request.stream else None

        async def keep(last: Event) -> None:
            if log is not None:
                await log.flush()
            await self._finish(turn, answer, last if log is not None else None)

        try:
            async with aclosing(events_of(answer, session, keep, self._deadline)) as events:
                async for event in events:
                    if event["type"] == "response.in_progress":
                        await self._store.write(responses.proceed, turn.owner, turn.id, stored_body(answer.body))
                    if log is not None and event["type"] not in _LAST:
                        log.add(event)
        except (NotFound, Ended):
            pass  # deleted or cancelled by another front
        except asyncio.CancelledError:
            await self._end(turn, answer, log, self._whys.get(turn.id))
        except Exception as error:
            failed(answer, error, name)
            await self._end(turn, answer, log, None)
        finally:
            if log is not None:
                log.close()
            del self._made[turn.id]
            self._whys.pop(turn.id, None)
            self._tell(turn.id)
            del self._news[turn.id]

    async def _end(self, turn: Turn, answer: Answer, log: _Log | None, why: _Why | None) -> None:
        """Store that it was not completed, with what there is of it."""
        if why is _Why.ENDED:
            return
        if why is _Why.CANCELLED:
            answer.stop("cancelled")
        elif answer.body["status"] != "failed":
            message = "the server was stopped while it made this response; send the request again."
            answer.stop("failed", {"code": "server_error", "message": message})
        try:
            if log is not None:
                await log.flush()
            await self._finish(turn, answer, answer.last() if log is not None and why is None else None)
        except (NotFound, Ended):
            pass
        except StoreError as error:
            logger.error("response %s stays unended until this process does (%s)", turn.id, error)

    async def _finish(self, turn: Turn, answer: Answer, last: Event | None) -> None:
        body = answer.body
        tokens = await self._maker.tokens(turn, answer)
        await self._store.write(
            responses.finish,
            turn.owner,
            turn.id,
            Status(body["status"]),
            stored_body(body),
            records_of(body["output"]),
            tokens,
            last_events=() if last is None else (_kept(last),),
        )

    async def _watch(self) -> None:
        """Stop making what has been ended from elsewhere."""
        while self._made:
            await asyncio.sleep(WATCH_SECONDS)
            ids = list(self._made)
            try:
                running = await self._store.read(responses.running, ids)
            except StoreError as error:
                logger.error("cancelled responses are made on for now (%s)", error)
                continue
            for id in ids:
                if id not in running:
                    self._stop(id, _Why.ENDED)

    def _stop(self, id: str, why: _Why) -> None:
        task = self._made.get(id)
        if task is not None and id not in self._whys:
            self._whys[id] = why
            task.cancel()

    def _tell(self, id: str) -> None:
        """Whoever follows it looks again."""
        self._news[id].set()
        self._news[id] = asyncio.Event()


class _Log:
    """Keeps the events of a response. Those that come while others are written are written next, together."""

    def __init__(self, store: AsyncStore, turn: Turn, tell: Callable[[str], None]) -> None:
        self._store = store
        self._turn = turn
        self._tell = tell
        self._waiting: list[KeptEvent] = []
        self._writing: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        """One more. Raises what the last write raised."""
        self._waiting.append(_kept(event))
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def flush(self) -> None:
        """Wait until all are kept."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def close(self) -> None:
        """No more come."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._store.write(kept.append, self._turn.owner, self._turn.id, batch)
            self._tell(self._turn.id)


def _kept(event: Event) -> KeptEvent:
    return KeptEvent(event["sequence_number"], named_event(event))


def _begin(session: StoreSession, response: Response, past: Past, first: list[KeptEvent]) -> None:
    begin_turn(session, response, past)
    kept.put(session, response.id, first)
