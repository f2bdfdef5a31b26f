"""Structured output: from a schema, regular expression or grammar to the tokens that may come next (llguidance).

llguidance is optional; without it requests for structured output are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import RequestError
from cellar.core.sampling import SamplingParams, StructuredOutputsParams, Thinking
from cellar.text.aside import Aside
from cellar.text.expendable import Budget, Lanes, OverBudget, Worker
from cellar.text.reasoning.budget import BudgetMatcher, Unbound
from cellar.text.reasoning.deferred import DeferredMatcher, FreeTokens
from cellar.text.schema import enforceable
from cellar.text.tokenizer import Tokenizer
from cellar.text.words import WordsMatcher, forbidden_words, mask_of

Mask = NDArray[np.int32]
"""int32 [ceil(vocab / 32)]; token t is allowed if bit t % 32 of word t // 32 is set."""

MAX_ERROR_CHARACTERS = 300

_TRIAL_STACK_BYTES = 2 * 2**20

_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}
"""JSON as models write it on one line. Every further blank costs a token and says nothing."""

_TIGHT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

_SENTENCES = (
    (
        re.compile(r"oneOf constraints are not supported"),
        "two branches of a oneOf may hold at once, and that cannot be ruled out; use anyOf, or give each branch a "
        "required property with a value of its own",
    ),
    (
        re.compile(r"^NoExtension"),
        "no text satisfies it: it leads to itself alone, or its parts exclude each other; add a way to end",
    ),
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), r"it has no way to enforce \1 here; say it by other keywords"),
)
"""Refusals of the compiler that name its own switches, or nothing to change."""


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    def mask(self) -> Mask:
        """The tokens that may come next; the end symbols alone once nothing more may come."""

    def consume(self, token: int) -> None:
        """A token came. One that the mask forbade leaves only the end symbols."""

    def copy(self) -> Matcher:
        """Another matcher in the same state."""


class GrammarCompiler:
    """Compiles for one tokenizer. `compile` may be called from several threads.

    `vocab_size` is the model's: tokens that the tokenizer does not have are never allowed. The vocabulary is read
    when the first grammar is compiled (about a second for 128,000 tokens). By the `clock` (seconds) matchers that are
    slow to follow do not keep the interpreter; without one all do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self._eos = tuple(dict.fromkeys(t for t in eos_token_ids if t < vocab_size))
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._aside: Aside | None = None
        self._free: FreeTokens | None = None

    def compile(self, constraint: StructuredOutputsParams) -> Matcher:
        """A matcher at the start. Raises RequestError for a grammar that is wrong, too large or not supported."""
        from llguidance import LLMatcher

        grammar = compiled_text(*constraint.key)
        if not self._eos:
            raise _refusal("the model has no end symbol to end it with")
        with self._lock:
            if self._aside is None:
                self._vocabulary = self._read_vocabulary()
                self._aside = Aside(self._vocabulary, self._clock)
        inner = LLMatcher(self._vocabulary, grammar, log_level=0)
        if inner.is_error():
            raise _refusal(inner.get_error())
        return _Matcher(inner, self._end_mask(), self._aside)

    def with_reasoning(self, matcher: Matcher | None, thinking: Thinking | None) -> Matcher:
        """The same for the content of an answer that may think first, no longer than its budget; None: any content."""
        with self._lock:
            if self._free is None:
                self._free = FreeTokens(self._tokenizer, self._vocab_size, self._eos)
            free = self._free
        if matcher is None:
            matcher = Unbound(free.mask | self._end_mask())
        elif thinking is not None:
            matcher = DeferredMatcher(matcher, thinking, free)
        if thinking is None or thinking.budget is None:
            return matcher
        return BudgetMatcher(matcher, thinking, thinking.budget, free)

    def with_words(self, matcher: Matcher, params: SamplingParams) -> Matcher:
        """The same without the words and tokens that the parameters forbid."""
        words = forbidden_words(self._tokenizer, params.bad_words or (), self._vocab_size)
        allowed = params.allowed_token_ids
        return WordsMatcher(matcher, None if allowed is None else mask_of(allowed, len(self.nothing())), words)

    def nothing(self) -> Mask:
        """A mask that allows no token."""
        return np.zeros(-(-self._vocab_size // 32), np.int32)

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos)),
            n_vocab=self._vocab_size,
            eos_token=list(self._eos),
        )

    def _end_mask(self) -> Mask:
        mask = self.nothing()
        words = mask.view(np.uint32)
        for token in self._eos:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return mask


class GrammarCheck:
    """Refuses what cannot be compiled, tried out in a process that may be ended; what was tried is remembered.

    llguidance overflows its stack on deep schemas, and takes gigabytes for some regular expressions of a few kilobytes:
    what passes here has been compiled once, over the alphabet of bytes, within the budget.
    """

    def __init__(self, budget: Budget, remembered: int = 1024) -> None:
        self._lanes = Lanes(f"{__name__}:trier", {}, budget)
        self._remembered = remembered
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[bytes, RequestError | None] = OrderedDict()

    def check(self, constraint: StructuredOutputsParams) -> None:
        """Return if it can be compiled. Takes as long as compiling. Raises RequestError."""
        key = hashlib.blake2b(repr(constraint.key).encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = key in self._outcomes
            refusal = self._outcomes.get(key)
        if not known:
            refusal = self._tried(constraint)
            with self._lock:
                self._outcomes[key] = refusal
                if len(self._outcomes) > self._remembered:
                    self._outcomes.popitem(last=False)
        if refusal is not None:
            raise RequestError(str(refusal), refusal.parameter, refusal.code)

    def close(self) -> None:
        """End the processes."""
        self._lanes.close()

    def _tried(self, constraint: StructuredOutputsParams) -> RequestError | None:
        try:
            self._lanes.call(constraint=constraint.key)
        except OverBudget as error:
            return _refusal(f"to compile it, {error}")
        except RequestError as error:
            return error
        return None


def trier() -> Worker:
    """In the process: compiles over bytes, and asks for the first mask.

    Its stack is a quarter of what a thread has as a rule: what nests as deeply as it can here has room elsewhere.
    """
    from llguidance import LLMatcher, LLTokenizer

    vocabulary = LLTokenizer("byte")
    threading.stack_size(_TRIAL_STACK_BYTES)
    thread = ThreadPoolExecutor(1)

    def tried(constraint: list[Any]) -> bool:
        return thread.submit(compiles, compiled_text(*constraint)).result()

    def compiles(grammar: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return True

    return tried


def compiled_text(kind: str, text: str, tight: bool, closed: bool, whitespace: str | None) -> str:
    """The grammar in llguidance's form, of a constraint's `key`.

    Raises RequestError if it is not even JSON, or llguidance is missing.
    """
    if find_spec("llguidance") is None:
        raise _refusal("llguidance is not installed; pip install llguidance")
    from llguidance import LLMatcher

    grammar: str
    match kind:
        case "json" | "json_object":
            spaced: dict[str, Any] = {"whitespace_pattern": whitespace}
            layout: Any = _TIGHT if tight else _COMPACT if whitespace is None else spaced
            try:
                schema = enforceable(json.loads(text), closed) if kind == "json" else {"type": "object"}
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=layout)
            except ValueError as error:
                raise _refusal(str(error)) from error
            except RecursionError:
                raise _refusal("the schema nests too deeply; make it flatter") from None
        case "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        case "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case _:
            grammar = LLMatcher.grammar_from_lark(_lark(text))
    return grammar


def _lark(text: str) -> str:
    """A grammar in Lark's notation, of one that may be llama.cpp's: that has a rule `root ::=`."""
    if re.search(r"^\s*root\s*::=", text, re.MULTILINE) is None:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise _refusal("the grammar nests too deeply; make it flatter") from None
    except Exception as error:  # it raises nothing narrower
        raise _refusal(str(error)) from error


class _Matcher:
    """Implements `Matcher` over llguidance's."""

    __slots__ = ("_aside", "_end", "_inner", "_slow")

    def __init__(self, inner: Any, end: Mask, aside: Aside, slow: bool = False) -> None:
        self._inner = inner
        self._end = end
        self._aside = aside
        self._slow = slow

    def mask(self) -> Mask:
        if self._inner.is_stopped():  # also after an error
            return self._end
        mask = np.empty_like(self._end)
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._end if self._inner.is_stopped() else mask

    def consume(self, token: int) -> None:
        if not self._inner.is_stopped():
            self._slow = self._aside.tell(self._inner, token, self._slow)

    def copy(self) -> _Matcher:
        return _Matcher(self._inner.deep_copy(), self._end, self._aside, self._slow)


class _Vocabulary:
    """What llguidance asks a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_token_ids} & set(range(vocab_size)))
        self.tokens = [tokenizer.id_to_bytes(token) for token in range(min(vocab_size, tokenizer.vocab_size))]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _refusal(reason: str) -> RequestError:
    for pattern, sentence in _SENTENCES:
        found = pattern.search(reason)
        reason = reason if found is None else found.expand(sentence)
    reason = " ".join(reason.split())[:MAX_ERROR_CHARACTERS].rstrip(".")
    return RequestError(f"the structured output cannot be enforced: {reason}.", "structured_outputs")
