"""Structured output: from a schema, regular expression or grammar to the tokens that may come next (llguidance).

llguidance is optional; without it requests for structured output are refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import RequestError
from cellar.core.sampling import StructuredOutputsParams
from cellar.text.tokenizer import Tokenizer

Mask = NDArray[np.int32]
"""int32 [ceil(vocab / 32)]; token t is allowed if bit t % 32 of word t // 32 is set."""

MAX_ERROR_CHARACTERS = 300

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between JSON's tokens: enough to indent, and no endless lines as small models like to write them."""


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
    when the first grammar is compiled (about a second for 128,000 tokens).
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(dict.fromkeys(t for t in eos_token_ids if t < vocab_size))
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, wanted: StructuredOutputsParams) -> Matcher:
        """A matcher at the start. Raises RequestError for a grammar that is wrong, too large or not supported."""
        from llguidance import LLMatcher

        grammar = compiled_text(wanted)
        if not self._eos:
            raise _refusal("the model has no end symbol to end it with")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        inner = LLMatcher(self._vocabulary, grammar, log_level=0)
        if inner.is_error():
            raise _refusal(inner.get_error())
        return _Matcher(inner, self._end_mask())

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos)),
            n_vocab=self._vocab_size,
            eos_token=list(self._eos),
        )

    def _end_mask(self) -> Mask:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        words = mask.view(np.uint32)
        for token in self._eos:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return mask


def check_grammar(wanted: StructuredOutputsParams) -> None:
    """Refuse what no tokenizer would make compile. Takes as long as compiling. Raises RequestError."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(compiled_text(wanted))
    if is_error:
        raise _refusal(messages[0])


def compiled_text(wanted: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form. Raises RequestError if it is not even JSON, or llguidance is missing."""
    if find_spec("llguidance") is None:
        raise _refusal("llguidance is not installed; pip install llguidance")
    from llguidance import LLMatcher

    grammar: str
    match wanted.kind:
        case "json" | "json_object":
            schema = wanted.text if wanted.kind == "json" else '{"type": "object"}'
            try:
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
            except ValueError as error:
                raise _refusal(str(error)) from error
        case "regex":
            grammar = LLMatcher.grammar_from_regex(wanted.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case _:
            grammar = LLMatcher.grammar_from_lark(wanted.text)
    return grammar


class _Matcher:
    """Implements `Matcher` over llguidance's."""

    __slots__ = ("_end", "_inner")

    def __init__(self, inner: Any, end: Mask) -> None:
        self._inner = inner
        self._end = end

    def mask(self) -> Mask:
        if self._inner.is_stopped():  # also after an error
            return self._end
        mask = np.empty_like(self._end)
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._end if self._inner.is_stopped() else mask

    def consume(self, token: int) -> None:
        if not self._inner.is_stopped():
            self._inner.consume_token(token)

    def copy(self) -> _Matcher:
        return _Matcher(self._inner.deep_copy(), self._end)


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
    reason = " ".join(reason.split())[:MAX_ERROR_CHARACTERS].rstrip(".")
    return RequestError(f"the structured output cannot be enforced: {reason}.", "structured_outputs")
