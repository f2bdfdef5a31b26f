"""Prompts and sampling parameters at the edge: what users hand in becomes checked requests, or one clear error."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import RequestError
from cellar.core.messages import IntArray, Request
from cellar.core.sampling import MAX_INTEGER, SamplingParams

_ALLOWED = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'
_MASK = 2**64 - 1


class Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with special tokens as the model wants them."""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found out without tokenizing it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that fits the model: token ids int32 [n], n >= 1, its text if it came as text, and the list if the ids
    came as one.
    """

    token_ids: IntArray
    text: str | None = None
    listed: list[int] | None = None


class PromptReader:
    """Turns prompts into `Prompt` and `Request`, and refuses what the model could not run.

    `max_model_len` bounds prompt plus output, so a prompt has at most one token less. `eos_token_ids` end
    every request that does not ignore them. `seed` and the number of requests so far give a seed to requests
    that bring none: the same calls in the same order get the same seeds.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Encoder | None = None,
        seed: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._seed = seed
        self._count = 0
        self._checked: tuple[SamplingParams, frozenset[int]] | None = None

    def read(self, prompt: object, room: int = 1) -> Prompt:
        """One prompt in any of its forms, beside which the context holds `room` tokens. Raises RequestError."""
        if isinstance(prompt, Mapping):
            return self._fields(prompt, room)
        if isinstance(prompt, str):
            return self.read_text(prompt, room=room)
        if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray)):
            return self._ids(prompt, None, room)
        raise RequestError(f"a prompt is of type {type(prompt).__name__}; it must be {_ALLOWED}.", "prompt")

    def read_text(self, text: str, add_special_tokens: bool = True, room: int = 1) -> Prompt:
        """A prompt that is text. One that cannot fit is refused before it is tokenized. Raises RequestError."""
        if self._tokenizer is None:
            raise RequestError("the prompt is text, but there is no tokenizer; give token ids, or load one.", "prompt")
        self.check_length(text, room)
        return self._ids(self._tokenizer.encode(text, add_special_tokens), text, room)

    def check_length(self, text: str, room: int = 1) -> int:
        """A number of tokens that a text has at least, without tokenizing it. Raises RequestError if it cannot fit."""
        least = 0 if self._tokenizer is None else self._tokenizer.least_tokens(text)
        if least + room > self.max_model_len:
            raise self._too_long(f"at least {least}", room)
        return least

    def read_all(self, prompts: object, room: int = 1) -> list[Prompt]:
        """One prompt, or a list of prompts. Raises RequestError that says which one is wrong."""
        found: list[Prompt] = []
        each = as_list(prompts)
        for k, prompt in enumerate(each):
            try:
                found.append(self.read(prompt, room))
            except RequestError as error:
                if len(each) == 1:
                    raise
                raise RequestError(f"prompt {k} of {len(each)}: {error}", error.parameter, error.code) from error
        return found

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that this model cannot honour. Raises RequestError."""
        _check_ids("stop_token_ids", params.stop_token_ids or (), self.vocab_size)
        _check_ids("logit_bias", params.logit_bias or (), self.vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), self.vocab_size)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, but there is none; use stop_token_ids, or load the tokenizer.", "stop"
            )

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        conversation: str | None = None,
        salt: bytes = b"",
        owner: str = "",
        tenant: str = "",
    ) -> tuple[Request, ...]:
        """The `params.n` sequences of one request, each with a seed of its own; all else is shared.

        Prompts of the same `params`, one after another, share the end symbols, too.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_INTEGER:
            raise RequestError(
                f"priority is {priority!r}, but must be an integer from {-MAX_INTEGER} to {MAX_INTEGER}.", "priority"
            )
        room = self.max_model_len - len(prompt.token_ids)
        stops = self._stops(params)
        seed = params.seed if params.seed is not None else _mixed(self._seed, self._count)
        self._count += 1
        return tuple(
            Request(
                id=request_id if params.n == 1 else f"{request_id}#{k}",
                prompt=prompt.token_ids,
                params=params,
                stop_ids=stops,
                max_tokens=0 if params.pooling is not None else min(params.max_tokens or room, room),
                priority=priority,
                salt=salt,
                conversation=conversation,
                seed=_signed(seed + k),
                owner=owner or (request_id if params.n > 1 else ""),
                tenant=tenant,
            )
            for k in range(params.n)
        )

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        """What ends a request. Parameters are looked at once, however many prompts they go with."""
        checked = self._checked
        if checked is None or checked[0] is not params:
            self.check(params)
            ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos)
            checked = self._checked = params, ends
        return checked[1]

    def _fields(self, prompt: Mapping[Any, Any], room: int) -> Prompt:
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise RequestError(
                f"a prompt has the key {sorted(map(str, unknown))[0]!r}; it must be {_ALLOWED}.", "prompt"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"the prompt is of type {type(text).__name__}; it must be a string.", "prompt")
        if ids is not None:
            return self._ids(ids, text, room)
        if text is None:
            raise RequestError(f"a prompt is an empty mapping; it must be {_ALLOWED}.", "prompt")
        return self.read_text(text, room=room)

    def _ids(self, ids: object, text: str | None, room: int) -> Prompt:
        if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes, bytearray)):
            raise RequestError(
                f"token ids are of type {type(ids).__name__}; they must be a list of integers.", "prompt"
            )
        if len(ids) == 0:
            raise RequestError("the prompt is empty; it must have at least one token.", "prompt")
        if isinstance(ids, np.ndarray) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise RequestError(
                f"token ids are {ids.ndim}-dimensional of {ids.dtype}; they must be one row of integers.", "prompt"
            )
        read = None if isinstance(ids, np.ndarray) else _packed(ids)
        listed = ids if read is not None and isinstance(ids, list) else None
        if not isinstance(ids, np.ndarray) and read is None:
            wrong = next((t for t in ids if not _integer(t)), None)
            if wrong is not None:
                raise RequestError(f"a prompt contains {wrong!r}; token ids must be integers.", "prompt")
        if len(ids) + room > self.max_model_len:
            raise self._too_long(str(len(ids)), room)
        ids = ids if read is None else read
        _check_ids("prompt", ids, self.vocab_size)
        return Prompt(np.asarray(ids, np.int32), text, listed)

    def _too_long(self, count: str, room: int) -> RequestError:
        output = ", at least one of them output" if room else ""
        return RequestError(
            f"the prompt has {count} tokens, but the context holds {self.max_model_len}{output}; "
            f"shorten it to {self.max_model_len - room} tokens or raise max_model_len.",
            "prompt",
            "context_length_exceeded",
        )


def as_list(prompts: object) -> list[Any]:
    """A list of prompts from one prompt or many; a list of integers is one prompt."""
    if isinstance(prompts, (list, tuple)):
        return [prompts] if prompts and all(_integer(p) for p in prompts) else list(prompts)
    return [prompts]


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not len(ids):
        return
    least, most = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    if least < 0 or most >= vocab_size:
        wrong = next(int(t) for t in ids if not 0 <= t < vocab_size)
        raise RequestError(
            f"{name} contains token id {wrong}, but the model knows 0 to {vocab_size - 1}; use ids in that range.", name
        )


def _packed(ids: Sequence[Any]) -> NDArray[np.int64] | None:
    """Token ids as int64 [n], if each is an integer of Python's own in its range.

    Faster than NumPy reads a list, and than asking each for its type: a sum is such an integer only if all are, or are
    truth values, of which the array says which to ask.
    """
    try:
        if type(sum(ids)) is not int:
            return None
        read = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), np.int64)
    except (TypeError, struct.error):
        return None
    may_be_truth = np.flatnonzero((read == 0) | (read == 1)).tolist()
    return None if any(isinstance(ids[k], bool) for k in may_be_truth) else read


def _integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _mixed(seed: int, count: int) -> int:
    """splitmix64 of a seed and a counter (Steele, Lea & Flood 2014): neighbours have nothing in common."""
    z = (seed + (count + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    seed &= _MASK
    return seed - 2**64 if seed >> 63 else seed
