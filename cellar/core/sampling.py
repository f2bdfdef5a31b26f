"""SamplingParams: how the tokens of one request are chosen, and when they end."""

from __future__ import annotations

import json as _json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cellar.core.errors import RequestError

MAX_SEQUENCES = 1024
MAX_LOGPROBS = 20
MAX_INTEGER = 2**31 - 1
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these float32 has no room for what comes of a logit."""

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
"""Which of a prompt's final hidden states make its vector: that of the last token, or the mean of all."""

_TOKEN_IDS = "token ids, 0 or more"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must be: exactly one of the fields, named as vLLM names them.

    `json` is a JSON schema (an object, or its text), `regex` a regular expression for all of the output,
    `choice` the texts to choose from, `grammar` a grammar in Lark's notation or llama.cpp's GBNF, `json_object` any
    JSON object. The options are for JSON: between its tokens comes one blank at most after a comma or colon, none with
    `disable_any_whitespace`, or what the regular expression `whitespace_pattern` says; objects that list their
    properties have no others unless `disable_additional_properties` is False. Raises RequestError.
    """

    json: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None
    kind: str = field(init=False, default="")
    text: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(self, name)]
        if self.json is not None and "json" not in given:
            given.append("json")  # the schema {} allows anything
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise RequestError(
                f"structured outputs need exactly one of json, regex, choice, grammar and json_object, not {named}.",
                "structured_outputs",
            )
        kind, value = given[0], getattr(self, given[0])
        self._check_options(kind)
        _check_unicode(kind, value)
        _check_unicode("whitespace_pattern", self.whitespace_pattern)
        if kind == "choice":
            ok = isinstance(value, (list, tuple)) and all(isinstance(text, str) and text for text in value)
            _check("choice", value, ok, "a list of non-empty strings", "structured_outputs")
            value = tuple(value)
            object.__setattr__(self, "choice", value)
        elif kind == "json" and isinstance(value, Mapping):
            value = _json.dumps(value)
            object.__setattr__(self, "json", value)
        elif kind != "json_object":
            _check(kind, value, isinstance(value, str), "a string", "structured_outputs")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", value if isinstance(value, str) else _json.dumps(value))

    @property
    def key(self) -> tuple[str, str, bool, bool, str | None]:
        """Equal for those that mean the same."""
        options = (self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern)
        return (self.kind, self.text, *options)

    def _check_options(self, kind: str) -> None:
        options = {
            "disable_any_whitespace": (bool, "true or false"),
            "disable_additional_properties": (bool, "true or false"),
            "whitespace_pattern": (str | None, "a regular expression"),
        }
        for name, (type, allowed) in options.items():
            value = getattr(self, name)
            _check(name, value, isinstance(value, type), allowed, "structured_outputs")
            if kind not in ("json", "json_object") and value != getattr(StructuredOutputsParams, name):
                raise RequestError(
                    f"{name} is for json and json_object, not {kind}; leave it out.", "structured_outputs"
                )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "disable_any_whitespace and whitespace_pattern exclude each other; give one.", "structured_outputs"
            )


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """How an answer sets the reasoning at its beginning apart from its content.

    One of `opens` begins it, after blanks at most, and the first of `closes` ends it; neither is shown. `begun`: the
    prompt, or the model's habit, has opened it already. `budget`: after so many tokens it is made to end.
    Raises RequestError.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    begun: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("opens", "closes"):
            marks = getattr(self, name)
            ok = isinstance(marks, tuple) and bool(marks) and all(isinstance(mark, str) and mark for mark in marks)
            _check(name, marks, ok, "a tuple of non-empty strings", "thinking")
        if self.budget is not None:
            _whole("budget", self.budget, 0)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, in vLLM's words; validated when made.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 keep all tokens. `seed` makes a request's
    tokens a function of the request alone, whoever else is in the batch; None draws one.
    `logprobs` = n returns the chosen token's log-probability and the n best; `prompt_logprobs` likewise
    for each prompt token. `max_tokens` None means up to the model's context. With `thinking` the answer's
    reasoning comes apart from its text, and stop strings are looked for in the text alone.
    Of `bad_words` none is written; with `allowed_token_ids` no other token is made, be it an end symbol.
    With `pooling` no token is made: the request's answer is one vector of its prompt's hidden states.
    Raises RequestError (with the field's name) for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    thinking: Thinking | None = None
    pooling: Pooling | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_SEQUENCES)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check("top_p", self.top_p, _finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check("seed", self.seed, _integer(self.seed) and -(2**63) <= self.seed < 2**63, "None or a 64-bit integer")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}; lower it to at most that.",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "True or False")
        strings = (self.stop,) if isinstance(self.stop, str) else self._all("stop", "non-empty strings")
        _check("stop", self.stop, all(isinstance(s, str) and s for s in strings), "non-empty strings")
        if strings and not self.detokenize:
            raise RequestError("stop strings need text, but detokenize is False; set it to True.", "detokenize")
        object.__setattr__(self, "stop_strings", strings)
        ids = self._all("stop_token_ids", _TOKEN_IDS)
        _check("stop_token_ids", self.stop_token_ids, all(map(_token, ids)), _TOKEN_IDS)
        grammar = self.structured_outputs
        ok = grammar is None or isinstance(grammar, StructuredOutputsParams)
        _check("structured_outputs", grammar, ok, "StructuredOutputsParams")
        _check("thinking", self.thinking, self.thinking is None or isinstance(self.thinking, Thinking), "Thinking")
        if self.thinking is not None and not self.detokenize:
            raise RequestError("reasoning is found in text, but detokenize is False; set it to True.", "detokenize")
        biases = {} if self.logit_bias is None else self.logit_bias
        _check("logit_bias", biases, isinstance(biases, Mapping), "a mapping of token ids to numbers")
        for token, bias in biases.items():
            _check("logit_bias", token, _token(token), _TOKEN_IDS)
            _check("logit_bias", bias, _finite(bias) and -100 <= bias <= 100, "from -100 to 100")
        words = self._all("bad_words", "non-empty strings")
        ok = not isinstance(self.bad_words, str) and all(isinstance(word, str) and word for word in words)
        _check("bad_words", self.bad_words, ok, "non-empty strings")
        allowed = self._all("allowed_token_ids", _TOKEN_IDS)
        ok = self.allowed_token_ids is None or bool(allowed)
        _check(
            "allowed_token_ids", self.allowed_token_ids, ok and all(map(_token, allowed)), f"one or more {_TOKEN_IDS}"
        )
        if self.pooling is not None:
            self._check_pooling()

    def _check_pooling(self) -> None:
        _check("pooling", self.pooling, self.pooling in POOLINGS, " or ".join(POOLINGS))
        for name in ("n", "logprobs", "prompt_logprobs", "structured_outputs", "thinking"):
            if getattr(self, name) != getattr(SamplingParams, name):
                raise RequestError(
                    f"{name} is for requests that make tokens, and pooling makes none; leave it out.", name
                )

    def _all(self, name: str, allowed: str) -> tuple[Any, ...]:
        """The members of a field that is a sequence, or None."""
        value = getattr(self, name)
        _check(name, value, value is None or isinstance(value, Iterable), allowed)
        return () if value is None else tuple(value)

    @property
    def greedy(self) -> bool:
        """True if no randomness is used."""
        return self.temperature == 0

    @property
    def masked(self) -> bool:
        """True if not every token may come next."""
        bounded = self.thinking is not None and self.thinking.budget is not None
        return bounded or self.structured_outputs is not None or self.picks

    @property
    def picks(self) -> bool:
        """True if some tokens or words are forbidden by themselves."""
        return bool(self.bad_words) or self.allowed_token_ids is not None

    @property
    def penalized(self) -> bool:
        """True if the choice depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _check_unicode(name: str, value: object) -> None:
    """Raise RequestError if something holds half of a surrogate pair."""
    try:
        (value if isinstance(value, str) else _json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"structured outputs' {name} holds half of a surrogate pair, which is not a character; send valid Unicode.",
            "structured_outputs",
        ) from None


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


def _finite(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _check(name: str, value: object, ok: bool, allowed: str, parameter: str | None = None) -> None:
    if not ok:
        raise RequestError(f"{name} is {value!r}, but must be {allowed}.", parameter or name)


def _number(name: str, value: object, low: float, high: float) -> None:
    _check(name, value, _finite(value) and low <= value <= high, f"from {low:g} to {high:g}")  # type: ignore[operator]


def _whole(name: str, value: object, low: int, high: int = MAX_INTEGER) -> None:
    ok = _integer(value) and low <= value <= high  # type: ignore[operator]
    _check(name, value, ok, f"an integer from {low} to {high}")
