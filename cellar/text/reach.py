"""Reach: the most characters of a text that one token can stand for, so that a text far too long for a model is known
to be before it is tokenized, which takes seconds for megabytes.

A step that may drop text, or make one token of any length of it, has no bound, and so has a tokenizer with such a
step. What is left are byte-pair encodings that know every character, with steps that keep all they are given: those of
Llama, Mistral, Qwen, GPT-2 and OPT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models

from cellar.text.decoding import byte_alphabet

COMPOSED = 4
"""The most code points that NFC makes one of: the longest canonical decomposition (Unicode Standard Annex 15)."""

_SHRINKS = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Normalizers -> the most characters that one of theirs stands for."""

_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
"""Pre-tokenizers that only cut, or replace character by character."""


def reach(backend: tokenizers.Tokenizer) -> float | None:
    """The bound in characters a token; None where there is none."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they take any number of blanks with them
        return None
    shrink = _shrink(backend.normalizer)
    steps = list(_steps(backend.pre_tokenizer))
    if shrink is None or not all(map(_keeps_all, steps)) or not isinstance(backend.model, models.BPE):
        return None
    pieces = backend.get_vocab(with_added_tokens=True)
    by_bytes = any(step["type"] == "ByteLevel" for step in (*steps, *_steps(backend.normalizer)))
    if not _complete(backend.model, pieces, by_bytes):
        return None
    normalizer = backend.normalizer
    # Such a token is looked for in normalized text, by its own normalized text.
    normalized = [normalizer.normalize_str(t.content) for t in added if t.normalized] if normalizer else []
    return shrink * max(map(len, (*pieces, *normalized)))


def _shrink(normalizer: Any) -> float | None:
    """Characters that one character of normalized text stands for, at most."""
    most = 1.0
    for step in _steps(normalizer):
        kind = step["type"]
        if kind == "Replace" and step["content"] and "String" in step["pattern"]:
            most *= max(1.0, len(step["pattern"]["String"]) / len(step["content"]))
        elif kind in _SHRINKS:
            most *= _SHRINKS[kind]
        else:
            return None
    return most


def _keeps_all(step: dict[str, Any]) -> bool:
    """True for a pre-tokenizer that drops nothing."""
    return step["type"] in _SPLITS or (
        step["type"] in ("Split", "Punctuation") and step["behavior"].lower() != "removed"
    )


def _complete(model: Any, pieces: dict[str, int], by_bytes: bool) -> bool:
    """True if every character has tokens of its own: by its bytes, or one for each that is unknown."""
    if by_bytes and byte_alphabet().keys() <= pieces.keys():
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in pieces for byte in range(256)):
        return True
    return model.unk_token in pieces and not model.fuse_unk


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as tokenizer.json has them."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step.get("normalizers") or step.get("pretokenizers") or ():
            yield from _flat(inner)
    else:
        yield step
