"""/v1/completions: continue texts or token ids."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from cellar.core.messages import CompletionOutput, RequestOutput
from cellar.engine.outputs import Delta
from cellar.engine.prompts import Prompt
from cellar.server.choices import Tables, completion_logprobs, plain_tables, usage, usage_of
from cellar.server.desk import Session, check_complete
from cellar.server.errors import ApiError
from cellar.server.pieces import lazily
from cellar.server.requests import CompletionRequest
from cellar.server.stream import event, unknown_usage
from cellar.text.tokenizer import Tokenizer


class Completions:
    """The answer to one CompletionRequest: its choices are those of prompt 0, then those of prompt 1, and so on."""

    def __init__(
        self, id: str, model: str, request: CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer | None
    ) -> None:
        self._head: dict[str, Any] = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._request = request
        self._n = request.n or 1
        self._prompts = prompts
        self._tokenizer = tokenizer

    async def whole(self, session: Session) -> dict[str, Any]:
        """The body of the answer."""
        async with session:
            outputs = await session.whole()
        made = ((k, output, made) for k, output in enumerate(outputs) for made in output.outputs)
        choices = lazily((self._choice(*one) for one in made), self._weight(outputs))
        return {**self._head, "choices": choices, "usage": usage_of(outputs, self._request.scores_only)}

    def _weight(self, outputs: list[RequestOutput]) -> int:
        """About how many values the answer has."""
        request = self._request
        logprobs, prompt = request.logprobs, request.prompt_logprobs
        if request.echo and logprobs is not None:
            prompt = logprobs
        sampled = sum(
            10 + len(m.token_ids) * (1 if logprobs is None else logprobs + 4) for o in outputs for m in o.outputs
        )
        scored = sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs) * (0 if prompt is None else prompt + 4)
        return sampled + scored

    async def events(self, session: Session) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        request, done = self._request, list[RequestOutput]()
        counts = [0] * len(session.prompts)
        offsets: dict[tuple[int, int], int] = {}
        scored: dict[int, Tables] = {}
        each = request.logprobs is not None or request.return_token_ids or request.continuous_usage
        plain = not (request.echo or request.scores_only or each)
        fast, usage_there = json.dumps(self._head, separators=(",", ":"))[:-1], unknown_usage(request.include_usage)
        async with session, aclosing(session.news()) as news:
            async for k, one in news:
                if isinstance(one, RequestOutput):
                    check_complete(one)
                    done.append(one)
                    continue
                if plain and one.finish_reason is None:
                    if one.text:
                        index = k * self._n + one.index
                        yield (
                            f'data: {fast},"choices":[{{"index":{index},"text":{json.dumps(one.text)},'
                            f'"logprobs":null,"finish_reason":null,"stop_reason":null}}]{usage_there}}}\n\n'
                        ).encode()
                    continue
                first = (k, one.index) not in offsets
                before = self._echo(k) if first and request.echo else ""
                if one.prompt_logprobs is not None:
                    scored[k] = one.prompt_logprobs
                counts[k] += len(one.token_ids)
                if request.scores_only and one.finish_reason is None:
                    continue
                tables = scored.get(k) if first and request.echo else None
                choice = self._part(k, one, before, offsets.get((k, one.index), 0), tables)
                said = choice["logprobs"]["tokens"] if choice["logprobs"] else ()
                offsets[k, one.index] = offsets.get((k, one.index), 0) + sum(map(len, said))
                if not (choice["text"] or choice["finish_reason"] or each):
                    continue
                if first and request.return_token_ids:
                    choice["prompt_token_ids"] = self._prompts[k].token_ids.tolist()
                body = {**self._head, "choices": [choice]}
                if request.continuous_usage:
                    body["usage"] = usage(len(self._prompts[k].token_ids), counts[k])
                elif request.include_usage:
                    body["usage"] = None
                yield event(body)
        if request.include_usage:
            yield event({**self._head, "choices": [], "usage": usage_of(done, request.scores_only)})

    def _choice(self, k: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        request = self._request
        echo, text = (self._echo(k) if request.echo else ""), ("" if request.scores_only else made.text)
        ids: list[int] = [] if request.scores_only else made.token_ids
        tables: Tables = () if request.scores_only else made.logprobs or ()
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs(k, ids, tables, output.prompt_logprobs if request.echo else None, 0)
        choice: dict[str, Any] = {
            "index": k * self._n + made.index,
            "text": echo + text,
            "logprobs": logprobs,
            "finish_reason": "length" if request.scores_only else made.finish_reason,
            "stop_reason": made.stop_reason,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = plain_tables(output.prompt_logprobs or (), request.prompt_logprobs)
        if request.return_token_ids:
            choice["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
            choice["token_ids"] = [] if request.scores_only else made.token_ids
        return choice

    def _part(self, k: int, delta: Delta, before: str, offset: int, scored: Tables | None) -> dict[str, Any]:
        """A chunk's choice. `scored` are the log-probabilities of the prompt, where it is echoed."""
        request = self._request
        text = before + ("" if request.scores_only else delta.text)
        ids: list[int] = [] if request.scores_only else delta.token_ids
        logprobs = None
        if request.logprobs is not None:
            tables: Tables = () if request.scores_only else delta.logprobs or ()
            logprobs = self._logprobs(k, ids, tables, scored, offset)
        if delta.finish_reason == "error":
            raise ApiError(500, f"the engine could not complete this request ({delta.stop_reason}).")
        choice: dict[str, Any] = {
            "index": k * self._n + delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if request.scores_only else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = [] if request.scores_only else delta.token_ids
        return choice

    def _logprobs(
        self,
        k: int,
        ids: Sequence[int],
        tables: Tables,
        scored: Tables | None,
        offset: int,
    ) -> dict[str, Any]:
        """Of tokens from `offset` in the text on, those of the prompt before them if it is `scored`."""
        count = self._request.logprobs or 0
        if scored is None:
            return completion_logprobs(ids, [tables], count, offset)
        prompt: list[int] = self._prompts[k].token_ids.tolist()
        first = "" if self._tokenizer is None else self._tokenizer.id_to_text(prompt[0])
        return completion_logprobs([*prompt, *ids], [scored, tables], count, offset, first)

    def _echo(self, k: int) -> str:
        """A prompt's text; of a prompt that came as ids, the text they have."""
        prompt = self._prompts[k]
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(prompt.token_ids.tolist())
