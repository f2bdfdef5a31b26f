"""Making responses: at once, for a client that waits, or in the background.

What has begun in the store ends there, however the making ends: with an answer, an error, or because nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any

from cellar.conversations import items, responses
from cellar.conversations.errors import ConversationLocked, Ended, NotFound
from cellar.conversations.records import ANSWERED, Response, Status, Tokens
from cellar.conversations.session import Session as StoreSession
from cellar.conversations.store import AsyncStore
from cellar.server.desk import Desk, Session
from cellar.server.prepare import beside
from cellar.server.responses.answer import Answer, Event
from cellar.server.responses.body import response_body
from cellar.server.responses.context import tokens_of
from cellar.server.responses.past import Past
from cellar.server.responses.records import record_of, records_of, stored_body
from cellar.server.responses.requests import ENCRYPTED, LOGPROBS
from cellar.server.responses.running import events_of, failed
from cellar.server.responses.sealing import Seal
from cellar.server.responses.tools import apart
from cellar.server.responses.turns import Turn
from cellar.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Maker:
    """Runs turns for clients that wait."""

    def __init__(
        self, desk: Desk, store: AsyncStore, seal: Seal, tokenizer: Tokenizer | None, deadline: float | None
    ) -> None:
        self._desk = desk
        self._tokenizer = tokenizer
        self._store = store
        self._seal = seal
        self._deadline = deadline

    def answer(self, turn: Turn, model: str, tokenizer: Tokenizer) -> Answer:
        """The answer to a turn, still empty."""
        request = turn.request
        body = response_body(request, turn.id, model, turn.created_at, turn.chat.params)
        num_top = (request.top_logprobs or 0) if request.includes(LOGPROBS) else None
        seal = (lambda text: self._seal.seal(text, turn.owner)) if request.includes(ENCRYPTED) else None
        return Answer(body, turn.chat.tools, tokenizer, num_top, seal, apart(request.tools or ()))

    async def tokens(self, turn: Turn, answer: Answer) -> Tokens | None:
        """The ids that an answered turn leaves for the next one."""
        output, history = answer.output, turn.past.history
        if output is None or self._tokenizer is None:
            return None
        work = partial(tokens_of, history, turn.chat, output, self._tokenizer)
        return await beside(len(output.prompt_token_ids), work)

    async def open(self, turn: Turn, name: str) -> Session:
        """Hand a turn to the engine. Raises RequestError, ApiError."""
        request = turn.request
        salt = (request.cache_salt or "").encode(errors="surrogatepass")
        prompts, params, priority = [turn.chat.prompt], turn.chat.params, request.priority or 0
        return await self._desk.open(turn.id, prompts, params, priority, turn.thread, salt, name, owner=turn.owner)

    async def events(self, turn: Turn, answer: Answer, name: str) -> AsyncGenerator[Event, None]:
        """All that is told of a response to a client that waits. Raises what ends it before it is complete.

        The first event comes when the engine has the turn: what fails before is raised before.
        """
        async with _Begun(self, self._store, turn, answer) as begun:
            session = await self.open(turn, name)
            for event in answer.begin():
                yield event
            async with aclosing(events_of(answer, session, begun.keep, self._deadline)) as events:
                async for event in events:
                    yield event

    async def told(self, turn: Turn, answer: Answer, name: str) -> AsyncGenerator[Event, None]:
        """The same; once there was an event, errors are one, too."""
        begun = False
        try:
            async with aclosing(self.events(turn, answer, name)) as events:
                async for event in events:
                    begun = True
                    yield event
        except Exception as error:
            if not begun:
                raise
            failed(answer, error, name)
            yield answer.last()

    async def whole(self, turn: Turn, answer: Answer, name: str) -> dict[str, Any]:
        """The response's object when it is complete. Raises what ends it before."""
        async with aclosing(self.events(turn, answer, name)) as events:
            async for _ in events:
                pass
        return answer.body


class _Begun:
    """A turn in the store: a conversation is held from its beginning; a response by itself is written at its end."""

    def __init__(self, maker: Maker, store: AsyncStore, turn: Turn, answer: Answer) -> None:
        self._maker = maker
        self._store = store
        self._turn = turn
        self._answer = answer
        self._held = False

    async def __aenter__(self) -> _Begun:
        if self._turn.request.conversation_id is not None:
            self._held = True
            begin = record_of(self._turn, self._answer.body)
            try:
                await self._store.write(begin_turn, begin, self._turn.past)
            except Exception:
                self._held = False
                raise
            except asyncio.CancelledError:  # it may still be written: what lets go comes behind it
                let_go(self._store, self._turn)
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._held:
            let_go(self._store, self._turn)

    async def keep(self, last: Event) -> None:
        """Store the response, for good. Raises StoreError."""
        turn, body = self._turn, last["response"]
        if not turn.request.stored:
            return
        tokens = await self._maker.tokens(turn, self._answer)
        if not self._held:
            await self._store.write(responses.add, record_of(turn, body), tokens)
            return
        status, output = Status(body["status"]), records_of(body["output"])
        kept = False
        try:
            await self._store.write(responses.finish, turn.owner, turn.id, status, stored_body(body), output, tokens)
            kept = True
        finally:
            self._held = False
            if not kept:
                let_go(self._store, turn)


def let_go(store: AsyncStore, turn: Turn) -> None:
    """Nobody waits for a response any more, or it failed: there is none, unless its answer was kept.

    It is not waited for, and comes behind all that is written already.
    """
    store.store.submit(_let_go, turn.owner, turn.id).add_done_callback(_said)


def begin_turn(session: StoreSession, response: Response, past: Past) -> Response:
    """Begin a response, if its conversation still is what was read of it. Raises as `responses.begin`."""
    begun = responses.begin(session, response)
    if response.conversation is not None:
        page = items.page(session, response.owner, response.conversation, limit=1)
        last = page.records[0].id if page.records else None
        lost = past.head is not None and begun.previous != past.head
        if last != past.last or lost:  # another turn was made meanwhile, or one deleted
            raise ConversationLocked(response.conversation)
    return begun


def _let_go(session: StoreSession, owner: str, id: str) -> None:
    if responses.get(session, owner, id).status not in ANSWERED:
        responses.remove(session, owner, id)


def _said(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, (NotFound, Ended)):
        logger.error("a conversation may be held until this process ends (%s)", error)
