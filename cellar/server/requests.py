"""Bodies of requests: the fields that have an effect, and the SamplingParams they mean.

Types are strict, as OpenAI's are: "1" is not a number. Ranges are checked where SamplingParams checks them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.server.errors import refused, whole_characters
from cellar.server.fields import CHAT, COMPLETION, Accepts, check_extra, unknown
from cellar.text.generation import NEUTRAL, GenerationConfig

MAX_N = 128

MAX_NAME = 256
"""Characters of a conversation's name."""

MAX_STOP = 8192
"""Characters of all stop strings of a request. They become an automaton of a few hundred bytes for each."""

# One wrong entry among a million is one error, not an error for every entry and each type that a field may have.
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

Variables = Annotated[dict[str, Any], Field(max_length=256)]
"""What a template is given besides the messages. 400,000 of them took half a gigabyte."""

Keep = Annotated[int, Field(ge=-1, lt=2**31, description="Tokens that a prompt is cut to; -1: what fits.")]

_SHARED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "prompt_logprobs"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos", "skip_special_tokens"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "bad_words", "allowed_token_ids"),
)
"""Fields that SamplingParams has under the same name."""

_STRUCTURED = frozenset(field.name for field in fields(StructuredOutputsParams) if field.init)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream says besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Sampling(_Body):
    """Fields that completions and chats share. None is as good as absent."""

    neutral: ClassVar[Mapping[str, tuple[Accepts, str]]] = {}

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Tokens | None = None
    truncate_prompt_tokens: Keep | None = None

    def check(self) -> None:
        """Refuse fields that nobody reads, and combinations without a meaning. Raises ApiError."""
        check_extra(self.model_extra or {}, self.neutral)
        if self.stream_options is not None:
            if not self.stream:
                raise refused("stream_options is for streams; set stream to true or leave it out.", "stream_options")
            for name in self.stream_options.model_extra or {}:
                raise unknown(f"stream_options.{name}")
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        for name, what, given in (("stop", "stop strings", strings), ("bad_words", "bad words", self.bad_words or ())):
            length = sum(map(len, given))
            if length > MAX_STOP:
                raise refused(
                    f"the {what} have {length} characters, but together they may have {MAX_STOP}; use shorter ones.",
                    name,
                )
            for one in given:
                whole_characters(one)
        if self.stream and self.prompt_logprobs is not None:
            raise refused("prompt_logprobs cannot be streamed; set stream to false.", "prompt_logprobs")

    def shared_params(self) -> dict[str, Any]:
        """Arguments of SamplingParams, without those that are absent."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        values["logit_bias"] = None if self.logit_bias is None else _bias(self.logit_bias)
        return {name: value for name, value in values.items() if value is not None}

    def structured(self) -> StructuredOutputsParams | None:
        """What the output must be, by `response_format` or `structured_outputs`. Raises RequestError, ApiError."""
        given = self.structured_outputs
        from_format = None if self.response_format is None else _format(self.response_format)
        if given is None:
            return from_format
        if from_format is not None:
            raise refused("response_format and structured_outputs cannot both be given.", "structured_outputs")
        for name in given:
            if name not in _STRUCTURED:
                raise unknown(f"structured_outputs.{name}")
        return StructuredOutputsParams(**{name: value for name, value in given.items() if value is not None})

    def conversation(self, session_id: str | None) -> str | None:
        """Which conversation it continues: by `prompt_cache_key`, else by the header X-Session-ID. Raises ApiError."""
        return conversation_name(self.prompt_cache_key, session_id)

    @property
    def salt(self) -> bytes:
        """What keeps its KV apart from that of others."""
        return (self.cache_salt or "").encode(errors="surrogatepass")

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk has its usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class CompletionRequest(_Sampling):
    """Body of /v1/completions."""

    neutral = COMPLETION

    prompt: Annotated[
        str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)], Field(description="Text or token ids.")
    ]
    echo: bool | None = None
    logprobs: int | None = None

    def params(
        self, structured: StructuredOutputsParams | None = None, generation: GenerationConfig = NEUTRAL
    ) -> SamplingParams:
        """How to sample; without `max_tokens` OpenAI's 16 tokens. Raises RequestError or ApiError."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise refused("max_tokens is 0, which only makes sense with echo; ask for at least 1.", "max_tokens")
        shared = self.shared_params()
        if self.echo and self.logprobs is not None:
            shared.setdefault("prompt_logprobs", self.logprobs)
        shared |= {"max_tokens": max_tokens or 1, "logprobs": self.logprobs, "structured_outputs": structured}
        return generation.params(shared)

    @property
    def scores_only(self) -> bool:
        """True if nothing is to be generated: the echoed prompt is all."""
        return self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise refused("prompt is an empty list; give at least one prompt.", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class ChatRequest(_Sampling):
    """Body of /v1/chat/completions."""

    neutral = CHAT

    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    def params(
        self, structured: StructuredOutputsParams | None = None, generation: GenerationConfig = NEUTRAL
    ) -> SamplingParams:
        """How to sample; without a limit as many tokens as the model's own, else the context. Raises RequestError or
        ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs needs logprobs; set logprobs to true.", "top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is None:
            limit = generation.sampling.get("max_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        given = {"max_tokens": limit, "logprobs": logprobs, "structured_outputs": structured}
        return generation.params(self.shared_params() | given)

    @property
    def names(self) -> dict[str, str]:
        """Fields that have another name in SamplingParams, or in what is read of the template's text."""
        return {"logprobs": "top_logprobs", "prompt": "messages"} | (
            {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else {}
        )


class TokenizeRequest(_Body):
    """Body of /tokenize: a text, or messages as the model would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Objects | None = None


class DetokenizeRequest(_Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Tokens


def conversation_name(prompt_cache_key: str | None, session_id: str | None) -> str | None:
    """What a conversation is called: by the field, else by the header. Raises ApiError."""
    by_field = prompt_cache_key is not None
    name = prompt_cache_key if by_field else session_id
    if name and len(name) > MAX_NAME:
        raise refused(
            f"the name of the conversation has {len(name)} characters, but may have {MAX_NAME}; use a shorter one.",
            "prompt_cache_key" if by_field else "X-Session-ID",
        )
    return name or None


def _format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind, schema_format = given.get("type"), given.get("json_schema")
    _only(given, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    match kind, schema_format:
        case "text", None:
            return None
        case "json_object", None:
            return StructuredOutputsParams(json_object=True)
        case "json_schema", {"schema": dict() as schema}:
            _only(schema_format or {}, ("name", "description", "schema", "strict"), "response_format.json_schema")
            return StructuredOutputsParams(json=schema)
    raise refused(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
        "response_format",
    )


def _only(given: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Refuse what nobody reads."""
    for name, value in given.items():
        if value is not None and name not in names:
            raise unknown(f"{where}.{name}")


def _bias(bias: Mapping[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise refused("logit_bias has a key that is not a token id; use decimal numbers.", "logit_bias") from None
