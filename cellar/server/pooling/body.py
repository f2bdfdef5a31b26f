"""Bodies of requests whose answers are vectors, or come of comparing them, as OpenAI, vLLM and Cohere have them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cellar.core.pooling import PoolingParams
from cellar.server.errors import refused
from cellar.server.fields import POOLING, check_extra, unknown
from cellar.server.requests import MAX_NAME, Keep, Texts, Tokens

Input = str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]


class _Pooled(BaseModel):
    """What all of them share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    # What the refusals of the engine are about, in the words of the body.
    names: ClassVar[dict[str, str]] = {}

    model: str | None = None
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Keep | None = None
    priority: int | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None

    def check(self) -> None:
        """Refuse fields that nobody reads. Raises ApiError."""
        check_extra(self.model_extra or {}, POOLING)

    def params(self) -> PoolingParams:
        """How vectors are made. Raises RequestError."""
        return PoolingParams(pooling=self.pooling)

    @property
    def salt(self) -> bytes:
        """What keeps its KV apart from that of others."""
        return (self.cache_salt or "").encode(errors="surrogatepass")


class EmbeddingRequest(_Pooled):
    """Body of /v1/embeddings."""

    names = {"prompt": "input"}

    input: Annotated[Input, Field(description="Text or token ids, one or many.")]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None

    def params(self) -> PoolingParams:
        """How vectors are made. Raises RequestError."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize is not False, pooling=self.pooling)

    def inputs(self) -> list[str | list[int]]:
        """Each by itself. Raises ApiError."""
        given: Any = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise refused("input is an empty list; give at least one text.", "input")
        return [given] if isinstance(given[0], int) else list(given)


class ScoreRequest(_Pooled):
    """Body of /v1/score: how near texts are to each other."""

    names = {"prompt": "text_2"}

    text_1: str | Texts
    text_2: Annotated[str | Texts, Field(description="One for all of text_1's, or one for each.")]

    def texts(self) -> tuple[list[str], list[str]]:
        """Both sides. Raises ApiError."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        for name, side in (("text_1", first), ("text_2", second)):
            if not side:
                raise refused(f"{name} is an empty list; give at least one text.", name)
        return first, second


class Document(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str

    def check(self) -> None:
        """Refuse fields that nobody reads: the first, where a validator would name a million. Raises ApiError."""
        for name in self.model_extra or {}:
            raise unknown(f"documents.{name}")


class RerankRequest(_Pooled):
    """Body of /v1/rerank: which documents are nearest to a query."""

    names = {"prompt": "documents"}

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        """As of all, and of each document. Raises ApiError."""
        super().check()
        for one in self.documents:
            if isinstance(one, Document):
                one.check()

    @property
    def texts(self) -> list[str]:
        """Of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]
