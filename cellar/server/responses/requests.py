"""Bodies of /v1/responses and /v1/conversations: the fields that have an effect, and the chat that they mean.

Types are strict, as in `cellar.server.requests`. None is as good as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cellar.server.errors import refused, whole_characters
from cellar.server.fields import RESPONSE, Accepts, check_extra, unknown
from cellar.server.requests import MAX_NAME, ChatRequest, Objects, Texts, Variables

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Of metadata: pairs, and the characters of each key and value."""

MAX_ITEMS = 20
"""Items that a conversation is given in one request."""

MAX_INPUT_ITEMS = 16_384
"""Items of a response's input: they are written one by one, and others' writes wait meanwhile."""

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"

INCLUDES = frozenset(
    {
        *(ENCRYPTED, LOGPROBS, "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    }
)
"""What may be asked for. All but two are about tools that this server does not have, so there is nothing to include."""

Metadata = dict[str, Any]
"""Its values are checked by `check_metadata`: one wrong entry among a million is one error, not a million."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def _no_extra(self, where: str = "") -> None:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise unknown(f"{where}{name}")


class ConversationName(_Body):
    """A conversation by its id."""

    id: Annotated[str, Field(max_length=MAX_NAME)]


class ResponseStreamOptions(_Body):
    """What a stream says besides the answer."""

    include_obfuscation: bool | None = None


class TextFormat(_Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    def response_format(self) -> dict[str, Any] | None:
        """The same for a chat. Raises ApiError."""
        self._no_extra("text.format.")
        if self.type != "json_schema":
            return None if self.type == "text" else {"type": self.type}
        if self.schema_ is None:
            raise refused("text.format of the type json_schema needs a schema; give one.", "text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(_Body):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(_Body):
    """How long to think before the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class InputRequest(_Body):
    """What becomes of a prompt: the fields that /v1/responses and /v1/responses/input_tokens share."""

    neutral: ClassVar[Mapping[str, tuple[Accepts, str]]] = RESPONSE

    model: str | None = None
    input: str | Annotated[Objects, Field(max_length=MAX_INPUT_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    conversation: Annotated[str, Field(max_length=MAX_NAME)] | ConversationName | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: Variables | None = None

    def check(self) -> None:
        """Refuse fields that nobody reads, and combinations without a meaning. Raises ApiError."""
        check_extra(self.model_extra or {}, self.neutral)
        for name in ("text", "reasoning"):
            part = getattr(self, name)
            if part is not None:
                part._no_extra(f"{name}.")
        if self.conversation is not None and self.previous_response_id is not None:
            raise refused(
                "previous_response_id and conversation both say what came before; give one of them.",
                "previous_response_id",
                "mutually_exclusive_parameters",
            )

    @property
    def conversation_id(self) -> str | None:
        """The conversation that this is a turn of."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def format(self) -> TextFormat | None:
        """What the answer must be, if it must be something."""
        return None if self.text is None else self.text.format

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], choice: Any) -> ChatRequest:
        """The chat with these messages; tools and choice as chats have them. Raises ApiError."""
        chat = ChatRequest(
            messages=messages,
            tools=tools or None,
            tool_choice=choice,
            response_format=None if self.format is None else self.format.response_format(),
            **self._sampling(),
        )
        chat.check()
        return chat

    def _sampling(self) -> dict[str, Any]:
        """More fields of the chat."""
        named = {name: getattr(self, name) for name in ("model", "parallel_tool_calls", "chat_template_kwargs")}
        return named | {"reasoning_effort": None if self.reasoning is None else self.reasoning.effort}


class ResponseRequest(InputRequest):
    """Body of /v1/responses."""

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Texts | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # what chats here know beyond OpenAI's fields
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None

    def check(self) -> None:
        """As `InputRequest.check`, and what is said of the answer."""
        super().check()
        check_metadata(self.metadata)
        check_include(self.include)
        if self.stream_options is not None:
            if not self.stream:
                raise refused("stream_options is for streams; set stream to true or leave it out.", "stream_options")
            self.stream_options._no_extra("stream_options.")
        if self.top_logprobs and not self.includes(LOGPROBS):
            raise refused(f"top_logprobs needs {LOGPROBS} in include.", "top_logprobs")
        if self.background and not self.stored:
            raise refused("a background response is fetched later, so store must be true; leave it out.", "store")
        if self.conversation is not None and not self.stored:
            raise refused("a turn of a conversation is kept in it, so store must be true; leave it out.", "store")

    @property
    def stored(self) -> bool:
        """True if the response is kept."""
        return self.store is not False

    def includes(self, what: str) -> bool:
        """True if the answer is to have this, too."""
        return what in (self.include or ())

    def _sampling(self) -> dict[str, Any]:
        logprobs = self.includes(LOGPROBS)
        return super()._sampling() | {
            **{name: getattr(self, name) for name in _SAMPLING},
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": logprobs or None,
            "top_logprobs": (self.top_logprobs or 0) if logprobs else None,
        }


class CountRequest(InputRequest):
    """Body of /v1/responses/input_tokens."""


class ConversationRequest(_Body):
    """Body of POST /v1/conversations."""

    items: Annotated[Objects, Field(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        """Refuse what nobody reads. Raises ApiError."""
        self._no_extra()
        check_metadata(self.metadata)


class ConversationUpdate(_Body):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata | None

    def check(self) -> None:
        """Refuse what nobody reads. Raises ApiError."""
        self._no_extra()
        check_metadata(self.metadata)


class ItemsRequest(_Body):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[Objects, Field(min_length=1, max_length=MAX_ITEMS)]

    def check(self) -> None:
        """Refuse what nobody reads. Raises ApiError."""
        self._no_extra()


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "ignore_eos", "priority", "cache_salt", "prompt_cache_key"),
)
"""Fields that a chat has under the same name."""


def check_include(include: list[str] | None) -> None:
    """Refuse what cannot be asked for. Raises ApiError."""
    for name in include or ():
        if name not in INCLUDES:
            raise refused(
                f"include has {name[:64]!r}, but may have {ENCRYPTED}, {LOGPROBS}, or what tools here never give.",
                "include",
            )


def check_metadata(metadata: Metadata | None) -> None:
    """Refuse more than OpenAI's bounds allow. Raises ApiError."""
    if len(metadata or {}) > MAX_PAIRS:
        raise refused(f"metadata has {len(metadata or {})} pairs, but may have {MAX_PAIRS}; use fewer.", "metadata")
    for key, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise refused("a value of metadata is no string; send strings.", "metadata")
        whole_characters(key + value)
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise refused(
                f"a key of metadata may have {MAX_KEY} characters and a value {MAX_VALUE}; shorten {key[:MAX_KEY]!r}.",
                "metadata",
            )
