"""From a scheduler's frames to what users read: text, log-probability tables, finish reasons, deltas for streams.

Token ids come in, one frame a step; stop strings are found here and reported back, so that the scheduler can end
their sequences. A request with n > 1 is several sequences that share one RequestOutput.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cellar.core.errors import IntegrityError, RequestError
from cellar.core.messages import (
    CompletionOutput,
    FinishReason,
    FloatArray,
    IntArray,
    Logprobs,
    RequestOutput,
    StepOutput,
)
from cellar.core.sampling import SamplingParams
from cellar.engine.tables import LogprobStore, LogprobTables
from cellar.text.detokenizer import Detokenizer, make_detokenizer
from cellar.text.reasoning.reader import ReasoningReader
from cellar.text.stops import StopMatcher
from cellar.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delta:
    """What one frame, or several that were told together, added to one sequence of a streamed request. The texts of all
    deltas are the whole text, and so are their `reasoning`s.

    `finished` says that the whole request has ended, not only this sequence. A sequence's first delta has the
    log-probabilities of the prompt, if they were asked for.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobTables | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    finished: bool = False
    prompt_logprobs: LogprobTables | None = None
    reasoning: str = ""

    def join(self, later: Delta) -> None:
        """Tell what came next with it."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs = self.logprobs.until(later.logprobs)
        self.finish_reason, self.stop_reason, self.finished = later.finish_reason, later.stop_reason, later.finished


class Shown(NamedTuple):
    """Text and reasoning that may be told now, and the stop string that the text completed."""

    text: str = ""
    stop: str | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """A stop string was found, or it failed: the scheduler is to finish it after `num_tokens` output tokens."""

    sequence_id: str
    num_tokens: int
    reason: FinishReason = FinishReason.STOP


@dataclass(slots=True)
class Processed:
    """What some frames led to: news of streams, requests that are complete, and sequences to be ended."""

    deltas: list[Delta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)


class OutputProcessor:
    """Holds the unfinished requests' text. One thread; no clock. Without a tokenizer there are ids only."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._news: dict[str, Delta] = {}  # sequence id -> what the current frame brought it
        self._stops: tuple[SamplingParams, StopMatcher | None] | None = None

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        sequence_ids: Sequence[str] | None = None,
        stream: bool = False,
    ) -> None:
        """Expect the frames of a request. `sequence_ids[k]` is continuation k; default: the request's own id.

        Only with `stream` there will be deltas. Raises RequestError for an id in use and for stop strings
        without a tokenizer. Whatever it raises, nothing is kept.
        """
        ids = [request_id] if sequence_ids is None else list(sequence_ids)
        if request_id in self._requests or any(id in self._sequences for id in ids) or len(set(ids)) < len(ids):
            raise RequestError(f"request id {request_id!r} is in use; choose another.", "request_id")
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, but there is none; use stop_token_ids.", "stop")
        held = prompt_token_ids
        tokens: list[int] = list(held) if isinstance(held, list) else np.asarray(held).tolist()
        request = _Request(request_id, prompt, tokens, params, stream, self._matcher(params), self._text_of)
        request.sequences += [_Sequence(request, id, k, self._detokenizer(request)) for k, id in enumerate(ids)]
        self._sequences |= zip(ids, request.sequences, strict=True)
        self._requests[request_id] = request

    def process(self, frame: StepOutput, done: Processed | None = None) -> Processed:
        """Take in a frame -> `done`, with what it led to. Sequences that are not (or no longer) known are ignored.

        One whose text or table cannot be made ends with an error, and the scheduler is to end it.
        """
        done, self._news = done or Processed(), {}
        finished = frame.finished
        counts: dict[str, int] = {}
        for id, cached in frame.num_cached_tokens.items():
            if (sequence := self._sequences.get(id)) is not None and sequence.index == 0:
                sequence.request.num_cached_tokens = cached
                sequence.request.queue_seconds = frame.queue_seconds.get(id, 0.0)
        for id, vector in frame.pooled.items():
            if (sequence := self._sequences.get(id)) is not None:
                sequence.request.pooled = vector
        for id, logprobs in frame.prompt_logprobs.items():
            if (sequence := self._sequences.get(id)) is not None and sequence.index == 0:
                try:
                    sequence.request.add_prompt_logprobs(logprobs)
                except Exception as error:
                    self._fail(sequence, error, done)
        for id, token in zip(frame.ids, frame.tokens, strict=True):
            sequence = self._sequences.get(id)
            if sequence is None:
                continue
            last = finished.get(id) if finished else None
            try:
                stop = self._take(sequence, token, last, frame, counts)
            except Exception as error:
                self._fail(sequence, error, done)
                continue
            if stop is not None:
                if last is None:
                    done.ends.append(SequenceEnd(id, len(sequence.token_ids)))
                self._end(sequence, FinishReason.STOP, stop, done)
        for id, (reason, detail) in finished.items():
            sequence = self._sequences.get(id)
            if sequence is not None:
                self._finish(sequence, reason, detail, done)
        done.deltas += self._news.values()
        return done

    def output(self, request_id: str) -> RequestOutput:
        """The request so far: a copy that later frames leave alone. KeyError for one that is not unfinished."""
        return self._requests[request_id].output()

    def live(self, request_id: str) -> list[str]:
        """Sequences of a request that have not ended; none if it is not known."""
        request = self._requests.get(request_id)
        return [] if request is None else [s.id for s in request.sequences if s.finish_reason is None]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End what has not ended of a request, and give what there is; None if it is not known."""
        done, self._news = Processed(), {}
        for id in self.live(request_id):
            self._finish(self._sequences[id], FinishReason.ABORT, None, done)
        return done.finished[0] if done.finished else None

    def _matcher(self, params: SamplingParams) -> StopMatcher | None:
        """What looks for the stop strings; made once for prompts of the same parameters, one after another."""
        if self._stops is None or self._stops[0] is not params:
            strings, include = params.stop_strings, params.include_stop_str_in_output
            self._stops = params, StopMatcher(strings, include) if strings else None
        return self._stops[1]

    def _detokenizer(self, request: _Request) -> Detokenizer | None:
        if self._tokenizer is None or not request.params.detokenize:
            return None
        return make_detokenizer(self._tokenizer, request.prompt_token_ids, request.params.skip_special_tokens)

    def _take(
        self,
        sequence: _Sequence,
        token: int,
        last: tuple[FinishReason, int | str | None] | None,
        frame: StepOutput,
        counts: dict[str, int],
    ) -> str | None:
        """One more token, with which its sequence ended if `last` is there; -> the stop string that it completed."""
        request = sequence.request
        hidden = last is not None and last == (FinishReason.STOP, token) and not request.include_stop
        shown = sequence.push(token, hidden)
        if sequence.logprobs is not None:
            counts[sequence.id] = counts.get(sequence.id, -1) + 1
            sequence.add_logprobs(frame.logprobs.get(sequence.id), counts[sequence.id], token)
        if request.stream:
            self._tell(sequence, shown, token)
        return shown.stop

    def _fail(self, sequence: _Sequence, error: Exception, done: Processed) -> None:
        """An answer cannot be told; the fault is its own, and others do not notice."""
        logger.error("sequence %s has failed", sequence.id, exc_info=error)
        done.ends.append(SequenceEnd(sequence.id, len(sequence.token_ids), FinishReason.ERROR))
        said = f"its text could not be made ({type(error).__name__}: {error})"
        if sequence.request.stream:
            self._tell(sequence, Shown())
        self._end(sequence, FinishReason.ERROR, said, done)

    def _finish(self, sequence: _Sequence, reason: FinishReason, detail: int | str | None, done: Processed) -> None:
        """The scheduler ended a sequence: what its text still holds comes out."""
        request = sequence.request
        try:
            shown = sequence.flush()
        except Exception as error:
            self._fail(sequence, error, done)
            return
        if shown.stop is not None:
            reason, detail = FinishReason.STOP, shown.stop
        elif isinstance(detail, int) and detail not in (request.params.stop_token_ids or ()):
            detail = None  # an end symbol of the model, which nobody asked for by its id
        if request.stream:
            self._tell(sequence, shown)
        self._end(sequence, reason, detail, done)

    def _tell(self, sequence: _Sequence, shown: Shown, token: int | None = None) -> None:
        """Add to what the current frame brings a streamed sequence."""
        delta = self._news.get(sequence.id)
        if delta is None:
            delta = Delta(sequence.request.id, sequence.index)
            self._news[sequence.id] = delta
            if not sequence.told:
                sequence.told = True
                delta.prompt_logprobs = sequence.request.prompt_tables()
        delta.text += shown.text
        delta.reasoning += shown.reasoning
        if token is not None:
            delta.token_ids.append(token)
        if sequence.logprobs is not None:
            stop = len(sequence.logprobs)
            delta.logprobs = LogprobTables(sequence.logprobs, stop - len(delta.token_ids), stop)

    def _end(self, sequence: _Sequence, reason: FinishReason, detail: int | str | None, done: Processed) -> None:
        del self._sequences[sequence.id]
        request = sequence.request
        sequence.finish_reason, sequence.stop_reason = reason.value, detail
        finished = all(s.finish_reason is not None for s in request.sequences)
        if (delta := self._news.get(sequence.id)) is not None:
            delta.finish_reason, delta.stop_reason, delta.finished = reason.value, detail, finished
        if finished:
            del self._requests[request.id]
            done.finished.append(request.output())
            request.sequences.clear()  # who name it: a thousand prompts would be a collection's work for 0.1 s

    def _text_of(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.id_to_text(token)


class _Request:
    """One request's fixed parts and its sequences."""

    __slots__ = (
        "id",
        "include_stop",
        "matcher",
        "num_cached_tokens",
        "num_logprobs",
        "params",
        "pooled",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "queue_seconds",
        "sequences",
        "stream",
        "text_of",
    )

    def __init__(
        self,
        id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stream: bool,
        matcher: StopMatcher | None,
        text_of: Callable[[int], str | None],
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.stream = stream
        self.include_stop = params.include_stop_str_in_output
        self.matcher = matcher
        self.num_logprobs = params.logprobs
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.pooled: FloatArray | None = None
        self.sequences: list[_Sequence] = []
        self.text_of = text_of
        self.prompt_logprobs: LogprobStore | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobStore(params.prompt_logprobs, text_of)
            self.prompt_logprobs.append_none()  # nothing before a first token would make it likely

    def add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Of tokens of the prompt, ascending; those that are known already are passed over."""
        store = self.prompt_logprobs
        if store is None:
            return
        for entry, position in enumerate(logprobs.index.tolist()):
            if len(store) <= position < len(self.prompt_token_ids):
                while len(store) < position:
                    store.append_none()
                store.append(logprobs, entry, self.prompt_token_ids[position])

    def prompt_tables(self) -> LogprobTables | None:
        """One for each token of the prompt, if they were asked for; None for those that are not known."""
        store = self.prompt_logprobs
        return None if store is None else LogprobTables(store, 0, len(self.prompt_token_ids))

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=all(sequence.finish_reason is not None for sequence in self.sequences),
            prompt_logprobs=self.prompt_tables(),
            num_cached_tokens=self.num_cached_tokens,
            queue_seconds=self.queue_seconds,
            pooled=self.pooled,
        )


class _Sequence:
    """One continuation: its ids, its text so far, and the state of its detokenizer and stop strings."""

    __slots__ = (
        "_ahead",
        "_detokenizer",
        "_matcher",
        "_min_tokens",
        "_parts",
        "_reader",
        "_thoughts",
        "cumulative_logprob",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "num_reasoning_tokens",
        "request",
        "stop_reason",
        "token_ids",
        "told",
    )

    def __init__(self, request: _Request, id: str, index: int, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.id = id
        self.index = index
        self.token_ids: list[int] = []
        asked = request.num_logprobs
        self.logprobs = None if asked is None else LogprobStore(asked, request.text_of)
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.told = False  # it has had a delta
        self.num_reasoning_tokens = 0
        self._parts: list[str] = []
        self._thoughts: list[str] = []
        self._detokenizer = detokenizer
        thinking = request.params.thinking
        self._reader = None if thinking is None or detokenizer is None else ReasoningReader(thinking)
        self._min_tokens = request.params.min_tokens
        self._matcher = None if request.matcher is None else request.matcher.fork()
        self._ahead: StopMatcher | None = None

    def push(self, token: int, hidden: bool) -> Shown:
        """What one more token shows. A `hidden` token has no text."""
        self.token_ids.append(token)
        detokenizer = self._detokenizer
        if detokenizer is None or hidden:
            return Shown()
        text, stop, reasoning = detokenizer.push(token), None, ""
        if self._reader is not None:
            reasoning, text = self._read(self._reader, text)
        if self._matcher is not None:
            if text:
                self._ahead = None
            text, stop = self._matcher.push(text, self._armed)
            ahead = detokenizer.ahead if self._reader is None or self._reader.over else ""
            if stop is None and ahead and self._stops_ahead(ahead):
                rest = self.flush(keep=False)
                text, stop = text + rest.text, rest.stop
        if text:
            self._parts.append(text)
        return Shown(text, stop, reasoning)

    def flush(self, keep: bool = True) -> Shown:
        """The rest of the text, and a stop string that it completes. With `keep` it joins the output here."""
        if self._detokenizer is None:
            return Shown()
        text, stop, reasoning = self._detokenizer.flush(), None, ""
        if self._reader is not None:
            reasoning, text = self._read(self._reader, text)
            rest = self._reader.flush()
            reasoning, text = reasoning + rest.reasoning, text + rest.content
            self._thoughts.append(rest.reasoning)
        if self._matcher is not None:
            text, stop = self._matcher.push(text, self._armed)
            if stop is None:
                text += self._matcher.flush()
        if text and keep:
            self._parts.append(text)
        return Shown(text, stop, reasoning)

    def add_logprobs(self, logprobs: Logprobs | None, entry: int, token: int) -> None:
        """Of the newest token. Raises IntegrityError if they have not come with it."""
        assert self.logprobs is not None
        if logprobs is None or entry >= len(logprobs.index):
            raise IntegrityError("a token came without the log-probability that its request asks for")
        self.cumulative_logprob += self.logprobs.append(logprobs, entry, token)

    def output(self) -> CompletionOutput:
        text = "".join(self._parts)
        self._parts = [text] if text else []
        self._thoughts = ["".join(self._thoughts)]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else LogprobTables(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            reasoning=self._thoughts[0],
            num_reasoning_tokens=self.num_reasoning_tokens,
        )

    def _read(self, reader: ReasoningReader, text: str) -> tuple[str, str]:
        """Reasoning and content of more text."""
        if reader.over:
            return reader.push(text)
        reasoning, text = reader.push(text)
        if reasoning:
            self._thoughts.append(reasoning)
        if reader.began:
            self.num_reasoning_tokens = len(self.token_ids)
        return reasoning, text

    @property
    def _armed(self) -> bool:
        return len(self.token_ids) > self._min_tokens

    def _stops_ahead(self, characters: str) -> bool:
        """Would a stop string be complete if the sequence ended here? Characters still held are seen once."""
        if self._ahead is None:
            assert self._matcher is not None
            self._ahead = self._matcher.fork()
        return self._ahead.push(characters, self._armed).stop is not None
