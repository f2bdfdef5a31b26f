"""Prompts cut to a number of tokens."""

from __future__ import annotations

from typing import Literal

from cellar.text.tokenizer import Tokenizer

Side = Literal["left", "right"]


def cut(ids: list[int], keep: int, side: Side) -> list[int]:
    """At most `keep` of some ids, at least 1: without those on the left, or on the right."""
    return ids if len(ids) <= keep else ids[-keep:] if side == "left" else ids[:keep]


def cut_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int, side: Side) -> list[int]:
    """At most `keep` ids of a text. Special tokens around it stay, as in transformers; they count."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    if not add_special_tokens:
        return cut(bare, keep, side)
    ids = tokenizer.encode(text)
    num_special = len(ids) - len(bare)
    if len(ids) <= keep or keep <= num_special:
        return cut(ids, keep, side)
    for begin in range(num_special + 1):
        if ids[begin : begin + len(bare)] == bare:
            return ids[:begin] + cut(bare, keep - num_special, side) + ids[begin + len(bare) :]
    return cut(ids, keep, side)
