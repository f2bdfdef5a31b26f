"""Desk: takes in the prompts of one HTTP request, and gives back their news. Limits and metrics are kept here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any, TypeVar, cast

from cellar.core.errors import RequestError
from cellar.core.messages import IntArray, RequestOutput, Tier
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.outputs import Delta
from cellar.engine.prompts import Prompt
from cellar.engine.stream import AsyncLLM
from cellar.server.admission import Admission, Ticket, Waiting
from cellar.server.config import LimitConfig
from cellar.server.errors import ApiError, unavailable, whole_characters
from cellar.server.host import EngineHost
from cellar.server.metrics import Metrics, Timing
from cellar.server.stream import TURN_SECONDS
from cellar.server.tenants import Tenants
from cellar.server.work import check_work

logger = logging.getLogger(__name__)

News = Delta | RequestOutput
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Work:
    """One prompt on its way."""

    news: AsyncIterator[News]
    ticket: Ticket
    timing: Timing
    num_sequences: int


class Session:
    """The prompts of one HTTP request, running. Leave it (`async with`), and what still runs is dropped."""

    def __init__(self, prompts: Sequence[Prompt], works: Sequence[_Work]) -> None:
        self.prompts = prompts
        self._works = works
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for work in self._works:
            work.ticket.served()

    async def news(self) -> AsyncGenerator[tuple[int, News], None]:
        """What was added to which prompt since the last look; each prompt's last one is its RequestOutput."""
        if len(self._works) == 1:
            async with aclosing(_watched(self._works[0])) as news:
                async for one in news:
                    yield 0, one
            return
        queue: asyncio.Queue[tuple[int, News | BaseException]] = asyncio.Queue()
        async for k, work in _by_turns(enumerate(self._works)):
            self._tasks.append(asyncio.create_task(_pump(k, work, queue)))
        left = len(self._works)
        while left:
            k, one_or_error = await queue.get()
            if isinstance(one_or_error, BaseException):
                raise one_or_error
            left -= isinstance(one_or_error, RequestOutput)
            yield k, one_or_error

    async def whole(self) -> list[RequestOutput]:
        """The complete outputs, in the order of the prompts."""
        done: dict[int, RequestOutput] = {}
        async with aclosing(self.news()) as news:
            async for k, one in news:
                if isinstance(one, RequestOutput):
                    check_complete(one)
                    done[k] = one
        return [done[k] for k in range(len(self._works))]


class Desk:
    """Starts sessions."""

    def __init__(
        self,
        host: EngineHost,
        limits: LimitConfig,
        metrics: Metrics,
        tenants: Tenants,
        log_requests: bool = False,
        waiting: Waiting | None = None,
    ) -> None:
        self._host = host
        self._limits = limits
        self._metrics = metrics
        self._tenants = tenants
        self._log_requests = log_requests
        self.admission = Admission(limits, waiting)

    def engine(self) -> AsyncLLM:
        """The engine. Raises ApiError (503) while there is none."""
        llm = self._host.llm
        if llm is None:
            raise unavailable("the engine is down and being started again; try again soon.", retry_after=5)
        return llm

    def read(self, prompt: Any, room: int = 1) -> Prompt:
        """A prompt, checked, in any thread; the context holds `room` tokens more. Raises RequestError, ApiError."""
        if isinstance(prompt, str):
            self.check_length(prompt, room)
        found = self.engine().read(prompt, room)
        count, longest = len(found.token_ids), self._limits.max_prompt_len
        if longest is not None and count > longest:
            raise _too_long(str(count), longest)
        return found

    def check_length(self, text: str, room: int = 1) -> str:
        """The text itself, unless it is too long for certain: known before it is tokenized. Raises as `read` does."""
        least, longest = self.engine().reader.check_length(whole_characters(text), room), self._limits.max_prompt_len
        if longest is not None and least > longest:
            raise _too_long(f"at least {least}", longest)
        return text

    async def flush(self, tier: Tier) -> int:
        """Have a tier drop whatever nobody uses, of all owners; -> how many chunks.

        Raises ApiError for a tier that there is not, and as `memory`.
        """
        dropped = (await self.engine().memory(flush=tier))[-1]
        if tier not in dropped:
            raise ApiError(404, f"this engine has no tier {tier.name.lower()}; /engine/status shows those it has.")
        return dropped[tier]

    async def memory(
        self,
        owner: str,
        names: Sequence[str],
        forget: bool = False,
        pin_seconds: float | None = None,
        keep: Sequence[IntArray] = (),
    ) -> list[dict[str, int]]:
        """Tokens of an owner's conversations, by the fastest tier (device, host, disk, remote) that has their KV.

        With `forget`, none of it is found any more when this returns, unless another conversation shares it, or one of
        the contexts (token ids) to `keep` has it. With `pin_seconds` it leaves each tier last for so long. Raises
        ApiError while there is no engine, CellarError if it ends meanwhile.
        """
        called = [self._tenants.conversation(owner, name) or name for name in names]
        kept = [(self._tenants.salt(owner, b""), ids) for ids in keep]
        answer = await self.engine().memory(*called, forget=forget, keep=kept, pin_seconds=pin_seconds)
        return [{tier.name.lower(): count for tier, count in tokens.items()} for tokens in answer]

    def salt(self, owner: str, cache_salt: bytes) -> bytes:
        """What keeps apart all that is remembered of a request's text: the same as of its KV."""
        return self._tenants.salt(owner, cache_salt)

    async def open(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        priority: int = 0,
        conversation: str | None = None,
        salt: bytes = b"",
        name: str = "",
        *,
        owner: str,
    ) -> Session:
        """Start prompts, all or none. `name` is what the client calls the request, for the log.

        `owner` is whose the request is (`owner_of`): no other's memory, conversation or id is meant by its own.

        Raises RequestError if they are not allowed, ApiError if too many wait.
        """
        llm = self.engine()
        lengths = [len(prompt.token_ids) for prompt in prompts]
        check_work(lengths, params, llm.max_model_len, self._limits)
        own_id, salt = self._tenants.id(owner, request_id), self._tenants.salt(owner, salt)
        conversation = self._tenants.conversation(owner, conversation)
        ids = [own_id if len(prompts) == 1 else f"{own_id}-{k}" for k in range(len(prompts))]
        whose: dict[str, Any] = {"conversation": conversation, "salt": salt, "owner": own_id, "tenant": owner}
        news = [
            llm.deltas(prompt, params, id, priority=priority, **whose)
            async for id, prompt in _by_turns(zip(ids, prompts, strict=True))
        ]
        # from here on nothing waits: whoever hangs up now leaves a session that ends
        tickets = self.admission.enter(lengths, params.n, owner)
        timings = [self._metrics.arrived(length, params, conversation is not None) for length in lengths]
        if self._log_requests:
            called = f" ({name})" if name not in request_id else ""
            sizes = f"{lengths[0]}" if len(lengths) == 1 else f"{sum(lengths)} in {len(lengths)} prompts"
            logger.info("request %s%s: prompt tokens %s, %s", request_id, called, sizes, without_text(params))
        works = [_Work(*parts, params.n) for parts in zip(news, tickets, timings, strict=True)]
        return Session(prompts, works)


def _too_long(count: str, longest: int) -> RequestError:
    return RequestError(
        f"the prompt has {count} tokens, but this server allows {longest}; shorten it.",
        "prompt",
        "context_length_exceeded",
    )


def check_complete(output: RequestOutput) -> None:
    """Raise ApiError if the engine could not complete a request."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            reason = completion.stop_reason or "its logits were not finite"
            raise ApiError(500, f"the engine could not complete this request ({reason}).")


def without_text(params: SamplingParams) -> str:
    """Parameters as they may be logged, in a line of bounded length: of what may be long, or quote the user, how many
    there are; of a grammar its kind. What is as by default is left out."""
    said = []
    for known in fields(params):
        value = getattr(params, known.name)
        if not known.init or value is None or value == known.default:
            continue
        if isinstance(value, StructuredOutputsParams):
            value = value.kind
        elif isinstance(value, Collection):
            value = f"{1 if isinstance(value, str) else len(value)} given"
        said.append(f"{known.name} {value}")
    return ", ".join(said) or "as by default"


async def _by_turns(items: Iterable[T]) -> AsyncGenerator[T, None]:
    """Each of them; every few milliseconds others have their turn."""
    slept = perf_counter()
    for item in items:
        if perf_counter() > slept + TURN_SECONDS:
            await asyncio.sleep(0)
            slept = perf_counter()
        yield item


async def _watched(work: _Work) -> AsyncGenerator[News, None]:
    """A prompt's news, counted."""
    complete = False
    try:
        async with aclosing(cast(AsyncGenerator[News, None], work.news)) as news:
            async for one in news:
                if isinstance(one, Delta):
                    work.ticket.began(one.index)
                    work.timing.delta(one.index, len(one.token_ids))
                else:
                    work.timing.ended(one)
                    complete = True
                yield one
    except RequestError:
        complete = True  # it never began
        raise
    finally:
        work.ticket.served()
        if not complete:
            work.timing.left(work.num_sequences)


async def _pump(k: int, work: _Work, queue: asyncio.Queue[tuple[int, News | BaseException]]) -> None:
    try:
        async with aclosing(_watched(work)) as news:
            async for one in news:
                queue.put_nowait((k, one))
    except Exception as error:
        queue.put_nowait((k, error))
