"""Front: requests in, RequestOutputs out. Everything between a user's words and the engine's token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cellar.core.errors import CellarError, RequestError
from cellar.core.messages import MemoryAnswer, MemoryQuestion, Request, RequestOutput, StepOutput
from cellar.core.sampling import SamplingParams
from cellar.engine.client import StepClient
from cellar.engine.outputs import OutputProcessor, Processed
from cellar.engine.prompts import Prompt, PromptReader
from cellar.text.chat import ChatTemplate
from cellar.text.prefill import begun_answer
from cellar.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been checked and not started: its n sequences."""

    id: str
    prompt: Prompt
    params: SamplingParams
    sequences: tuple[Request, ...]


class Front:
    """An engine and the text around it; belongs to the thread that turns the engine.

    The n sequences of a request share the KV of its prompt: the first is added alone, its siblings when its
    first token has come, so that they find the prompt computed.
    """

    def __init__(
        self,
        engine: StepClient,
        reader: PromptReader,
        tokenizer: Tokenizer | None = None,
        templates: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.tokenizer = tokenizer
        self.templates = templates
        self._outputs = OutputProcessor(tokenizer)
        self._siblings: dict[str, tuple[Request, ...]] = {}

    def read_chat(
        self, messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any], continues: bool = False
    ) -> Prompt:
        """The prompt of a conversation, whose last message is gone on with if it `continues`; `variables` go to the
        template. Raises RequestError.
        """
        if self.templates is None:
            raise RequestError(
                "messages need a tokenizer, but there is none; open the LLM without skip_tokenizer_init."
            )
        text = self.templates.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        text = begun_answer(text, messages) if continues else text
        return self.reader.read_text(text, add_special_tokens=False)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        conversation: str | None = None,
        salt: bytes = b"",
        owner: str = "",
        tenant: str = "",
    ) -> Prepared:
        """Check a request and start nothing. Raises RequestError."""
        sequences = self.reader.requests(request_id, prompt, params, priority, conversation, salt, owner, tenant)
        return Prepared(request_id, prompt, params, sequences)

    def start(self, prepared: Sequence[Prepared], stream: bool = False) -> None:
        """Start requests; all of them, or none and RequestError if one could never run."""
        for one in prepared:
            self.add(one, stream)
        refused = self.engine.refused()
        reasons = [refused[id] for one in prepared if (id := one.sequences[0].id) in refused]
        if reasons:
            for one in prepared:
                self.abort(one.id)
            raise RequestError(reasons[0])

    def add(self, one: Prepared, stream: bool = False) -> None:
        """Start a request at the next turn; if it could never run it comes back with an error.

        Only with `stream` there will be deltas. Raises RequestError if the id is in use.
        """
        ids = tuple(sequence.id for sequence in one.sequences)
        tokens = one.prompt.token_ids if one.prompt.listed is None else one.prompt.listed
        self._outputs.add(one.id, one.prompt.text, tokens, one.params, ids, stream)
        if len(ids) > 1:
            self._siblings[ids[0]] = one.sequences[1:]
        self.engine.add(one.sequences[0])

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drop a request at any moment, and give what there is of it; None if it is not running."""
        for id in self._outputs.live(request_id):
            self._siblings.pop(id, None)
            self.engine.abort(id)
        return self._outputs.abort(request_id)

    def turn(self, timeout: float | None = None) -> Processed:
        """One turn of the engine; -> news of streams, and requests that are complete."""
        news = Processed()
        for frame in self.engine.turn(timeout):
            if self._siblings:
                self._add_siblings(frame)
            self._outputs.process(frame, news)
        for end in news.ends:
            self.engine.finish(end.sequence_id, end.num_tokens, end.reason)
        return news

    def output(self, request_id: str) -> RequestOutput:
        """A copy of what there is of a running request. Raises KeyError if it is not running."""
        return self._outputs.output(request_id)

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer | CellarError], None]) -> None:
        """See `StepClient.memory`."""
        self.engine.memory(question, then)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _add_siblings(self, frame: StepOutput) -> None:
        for id in self._siblings.keys() & (set(frame.ids) | frame.finished.keys()):
            siblings = self._siblings.pop(id)
            if id in frame.ids:
                self.engine.add(*siblings)
            else:  # it ended without a token, by an error that is theirs too
                frame.finished |= {sibling.id: frame.finished[id] for sibling in siblings}
