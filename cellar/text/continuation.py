"""A conversation goes on from the ids that it consists of; answers are never tokenized again (Pensieve §3.4.3.4).

What a template renders for all messages must begin with the text that the ids before the last answer stood for, and
with that answer; then the rest is new. If it does not, a template or a tool call has rewritten old turns, and the whole
is tokenized anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cellar.text.tokenizer import Tokenizer

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptText:
    """What a rendered prompt is known by: characters, and SHA-256."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Of a whole text."""
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        """True if another text begins with it."""
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


def answer_ids(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> IntArray | None:
    """The ids of an answer that a conversation keeps: int32 [n], those that stand for its text.

    ids: all that were made. An end symbol goes, the template writes it; so does what lies beyond a stop string, and
    of a token across that border the part before it is tokenized again. None if the ids do not stand for the text
    (special tokens were left out of it): then nothing is kept.
    """
    kept = _without_end(tokenizer, ids, text)
    whole, wanted = tokenizer.decode(kept, False).lstrip(), text.lstrip()
    if whole == wanted:
        return np.array(kept, np.int32)
    if not whole.startswith(wanted):
        return None
    while kept and not wanted.startswith(said := tokenizer.decode(kept, False).lstrip()):
        kept.pop()
    rest = wanted[len(said) :] if kept else text
    kept += tokenizer.encode_inside(rest)
    return np.array(kept, np.int32) if tokenizer.decode(kept, False).lstrip() == wanted else None


def thinking_ids(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> IntArray | None:
    """The same of an answer that thought before it said `text`: int32 [n], the ids of both.

    They stand for the next prompt only as long as the template shows the thought, as between a call and its answer;
    `new_ids` sees whether it does. None if the ids do not end with the text (a stop string has cut it).
    """
    kept = _without_end(tokenizer, ids, text)
    if not tokenizer.decode(kept, False).rstrip().endswith(text.strip()):
        return None
    return np.array(kept, np.int32)


def _without_end(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    kept = list(ids)
    if kept and kept[-1] in tokenizer.special_ids and not text.endswith(tokenizer.decode(kept[-1:], False) or "\0"):
        kept.pop()
    return kept


def new_ids(
    tokenizer: Tokenizer, prompt: PromptText, answer: IntArray | Sequence[int], rendered: str
) -> IntArray | None:
    """The ids to be added to a context: int32 [n], those of what `rendered` has behind prompt and answer.

    The context ends with the ids of `answer`, as `answer_ids` gave them. Blanks around an answer may differ, since
    templates trim them. None if the rendered text does not go on from the context.
    """
    if not prompt.begins(rendered):
        return None
    said = tokenizer.decode([int(id) for id in answer], False)
    core = said.strip()
    begin = prompt.length
    if core:
        while begin < len(rendered) and rendered[begin].isspace():
            begin += 1
        if not rendered.startswith(core, begin):
            return None
        begin += len(core)
    trail = said[len(said.rstrip()) :]
    if rendered.startswith(trail, begin):
        begin += len(trail)
    return np.array(tokenizer.encode_inside(rendered[begin:]), np.int32)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
