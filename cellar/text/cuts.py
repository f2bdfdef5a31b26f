"""Cuts: places where a text may be divided so that the parts, tokenized one by one, give the ids of the whole.

A tokenizer looks for its added tokens first, and tokenizes what lies between them section by section. So a text may
be cut before an added token that is taken as it stands, and that no other added token can overlap: then every
occurrence of it is found, whatever stands around. Only the very beginning of a text may be treated in its own way, and
a part that begins with an added token has no section there.

Inside a section a pre-tokenizer may divide words, and nothing merges across. Where its pattern is one of those known
here, a space between two Latin letters begins a word, whatever stands around: none of them looks behind, and none has a
match with a letter before a space.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

MAX_TOKENS = 64
"""Added tokens that are looked for. Those with digits in them are mostly reserved ones, which no template writes."""

MAX_LENGTH = 64
"""Characters of the longest match."""

_WORDS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""The patterns of GPT-2, of the model that ships with Cellar, and of Llama 3."""

_WORD_CUT = "(?<=[A-Za-z]) (?=[A-Za-z])"


def cuts(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """What matches where a text may be cut, right before the match; None if nothing does for certain."""
    found = [re.escape(content) for content in sorted(safe_tokens(backend), key=len, reverse=True)]
    if _divides_words(backend):
        found.append(_WORD_CUT)
    return re.compile("|".join(found)) if found else None


def safe_tokens(backend: tokenizers.Tokenizer) -> list[str]:
    """Added tokens that are always found, wherever they stand."""
    if backend.encode_special_tokens:
        return []
    added = list(backend.get_added_tokens_decoder().values())
    contents = {token.content for token in added}
    alone = any(token.single_word for token in added)  # such a token is none beside a letter
    edges = _Edges(contents)
    safe = []
    for token in added:
        content = token.content
        if (
            not token.special
            or not 0 < len(content) <= MAX_LENGTH
            or content != content.strip()
            or any(map(str.isdigit, content))
        ):
            continue
        if token.lstrip or token.rstrip or token.single_word or (token.normalized and backend.normalizer is not None):
            continue
        if alone and (content[0].isalnum() or content[0] == "_"):
            continue
        if not edges.overlap(content):
            safe.append(content)
    return safe[:MAX_TOKENS]


class _Edges:
    """Added tokens by what they begin, end, and are made of."""

    def __init__(self, contents: set[str]) -> None:
        self._contents = contents
        self._all = "\0".join(contents)
        self._begins = {content[:k] for content in contents for k in range(1, len(content))}
        self._ends = {content[k:] for content in contents for k in range(1, len(content))}

    def overlap(self, content: str) -> bool:
        """True if another added token, or a second one of the same, may take some of its characters."""
        sizes = range(1, len(content))
        if any(content[:k] in self._ends or content[-k:] in self._begins for k in sizes):
            return True
        parts = {content[a:b] for a in range(len(content)) for b in range(a + 1, len(content) + 1)}
        return self._all.count(content) > 1 or bool((parts - {content}) & self._contents)


def _divides_words(backend: tokenizers.Tokenizer) -> bool:
    """True if a space between Latin letters always begins a word."""
    if backend.normalizer is not None or backend.pre_tokenizer is None:
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added):
        return False
    state: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return bool(steps[0]["use_regex"] and not steps[0]["add_prefix_space"])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, alphabet = steps
    return (
        split["pattern"].get("Regex") in _WORDS
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not alphabet["use_regex"]
        and not alphabet["add_prefix_space"]
    )
