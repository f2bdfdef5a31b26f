"""PoolingParams: what is made of a prompt's final hidden states, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from cellar.core.errors import RequestError
from cellar.core.messages import FloatArray, RequestOutput
from cellar.core.sampling import Pooling, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes a vector, in vLLM's words; validated when made.

    `pooling` is `last` or `mean` (None: as the model says). Of the vector the first `dimensions` numbers are taken
    (None: all), and with `normalize` they are divided by their Euclidean length. Raises RequestError with the field's
    name.
    """

    dimensions: int | None = None
    normalize: bool = True
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if self.pooling not in (None, *get_args(Pooling)):
            raise RequestError(f"pooling is {self.pooling!r}, but must be last or mean.", "pooling")
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize is {self.normalize!r}, but must be True or False.", "normalize")
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(f"dimensions is {size!r}, but must be an integer, 1 or more.", "dimensions")

    def sampling(self, hidden_size: int, own: str) -> SamplingParams:
        """The request to a model with so many features, whose own way of pooling is `own`. Raises RequestError."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise RequestError(
                f"dimensions is {self.dimensions}, but the model's vectors have {hidden_size}; ask for at most that.",
                "dimensions",
            )
        # What a model asks for that nobody can do is refused in the same words as what a request asks for.
        return SamplingParams(temperature=0, detokenize=False, pooling=self.pooling or own)  # type: ignore[arg-type]

    def vector(self, pooled: FloatArray) -> FloatArray:
        """The answer: float32 [dimensions]. A vector of zeros stays as it is."""
        cut = pooled[: self.dimensions]
        length = float(np.linalg.norm(cut.astype(np.float64))) if self.normalize else 0.0
        return cut / np.float32(length) if length > 0 else cut


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt with its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are: the cosine of their vectors, in [-1, 1]."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts with its score; `prompt_token_ids` are those of both, one after the other."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    num_cached_tokens: int = 0
    finished: bool = True


def embedded(output: RequestOutput, params: PoolingParams) -> FloatArray:
    """The vector of a complete request. Raises RequestError with the engine's reason if it failed."""
    if output.pooled is None:
        raise RequestError(f"the prompt could not be pooled ({output.outputs[0].stop_reason}).", "prompt")
    return params.vector(output.pooled)


def cosine(a: FloatArray, b: FloatArray) -> float:
    """Of the angle between two vectors, in [-1, 1]; 0 if one of them is all zeros."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    length = float(np.linalg.norm(x) * np.linalg.norm(y))
    return max(-1.0, min(1.0, float(x @ y) / length)) if length > 0 else 0.0


def pairs(first: int, second: int) -> list[tuple[int, int]]:
    """Which text is held against which: one with each, or each with its own. Raises RequestError."""
    if first == second:
        return [(k, k) for k in range(second)]
    if first == 1:
        return [(0, k) for k in range(second)]
    raise RequestError(
        f"there are {first} first texts for {second} second ones; give one for all or one for each.", "text_1"
    )
