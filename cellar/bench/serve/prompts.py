"""Scripts of a load test: what each turn of each conversation says to the server, history included."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from cellar.bench.serve.client import Answer
from cellar.bench.workloads import Conversation, Load, Piece, Turn, Vocabulary
from cellar.text.tokenizer import Tokenizer

_MADE_UP = 1 << 41
"""Keys from here on belong to answers whose tokens the server did not tell."""

UNKNOWN_VOCABULARY = 1000
"""Ids below this are ordinary tokens in every vocabulary that is in use."""


class Talk(Protocol):
    """One conversation, turn by turn."""

    def say(self) -> bytes:
        """Body of the next turn's request."""

    def heard(self, answer: Answer) -> None:
        """The turn was answered."""


class Script(Protocol):
    """All conversations of one run."""

    def talk(self, k: int) -> Talk:
        """Conversation k, from its beginning."""


def choose_vocabulary(tokenizer: Tokenizer | None, size: int | None, seed: int) -> Vocabulary:
    """Ids of ordinary tokens: special ones stand at the beginning or the end of a vocabulary."""
    high = size or UNKNOWN_VOCABULARY
    if tokenizer is not None and size is None:
        high = min((id for id in tokenizer.special_ids if id > tokenizer.vocab_size // 2), default=tokenizer.vocab_size)
    return Vocabulary(min(256, high // 8), high, seed)


class TokenScript:
    """Completions of token ids: prompts have exactly the lengths that were asked for, and no tokenizer is needed."""

    def __init__(
        self,
        load: Load,
        vocabulary: Vocabulary,
        fields: Mapping[str, Any],
        ignore_eos: bool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._load = load
        self.vocabulary = vocabulary
        self.fields = dict(fields)
        self.ignore_eos = ignore_eos
        self._tokenizer = tokenizer

    def talk(self, k: int) -> Talk:
        """Conversation k."""
        return _TokenTalk(self, k, self._load.conversations[k])

    def tokens(self, turn: Turn) -> list[int]:
        """What a turn adds."""
        if turn.text is not None and self._tokenizer is not None:
            return self._tokenizer.encode(turn.text, add_special_tokens=False)
        found: list[int] = self.vocabulary.tokens(turn).tolist()
        return found


class _TokenTalk:
    def __init__(self, script: TokenScript, k: int, conversation: Conversation) -> None:
        self._script = script
        self._k = k
        self._turns = conversation.turns
        self._at = 0
        self._history: list[int] = []

    def say(self) -> bytes:
        turn = self._turns[self._at]
        self._history += self._script.tokens(turn)
        fields = dict(self._script.fields)
        if len(self._turns) > 1:
            fields["return_token_ids"] = True
        if self._script.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, "prompt": self._history, "max_tokens": turn.output_tokens}).encode()

    def heard(self, answer: Answer) -> None:
        ids = answer.token_ids
        if len(ids) != answer.output_tokens:  # it does not tell them: others of the same number stand for them
            key = _MADE_UP + (self._k << 16) + self._at
            ids = self._script.vocabulary.piece(Piece(key, answer.output_tokens)).tolist()
        self._history += ids
        self._at += 1


class ChatScript:
    """Chats of text. Random tokens are spelled out beforehand; the template and tokenizing again change the lengths
    a little, so that the reported prompt tokens are the server's."""

    def __init__(self, load: Load, texts: list[list[str]], fields: Mapping[str, Any], ignore_eos: bool) -> None:
        self._load = load
        self._texts = texts
        self.fields = dict(fields)
        self.ignore_eos = ignore_eos

    @classmethod
    async def spelled(
        cls,
        load: Load,
        vocabulary: Vocabulary,
        fields: Mapping[str, Any],
        ignore_eos: bool,
        decode: Callable[[list[int]], Awaitable[str]],
    ) -> ChatScript:
        """A script whose random tokens are put into words by `decode`."""
        texts = []
        for conversation in load.conversations:
            said = []
            for turn in conversation.turns:
                said.append(turn.text if turn.text is not None else await decode(vocabulary.tokens(turn).tolist()))
            texts.append(said)
        return cls(load, texts, fields, ignore_eos)

    def talk(self, k: int) -> Talk:
        """Conversation k."""
        return _ChatTalk(self, self._load.conversations[k], self._texts[k])


class _ChatTalk:
    def __init__(self, script: ChatScript, conversation: Conversation, texts: list[str]) -> None:
        self._script = script
        self._turns = conversation.turns
        self._texts = texts
        self._at = 0
        self._messages: list[dict[str, str]] = []

    def say(self) -> bytes:
        self._messages.append({"role": "user", "content": self._texts[self._at]})
        fields = dict(self._script.fields)
        if self._script.ignore_eos:
            fields["ignore_eos"] = True
        limit = self._turns[self._at].output_tokens
        return json.dumps({**fields, "messages": self._messages, "max_completion_tokens": limit}).encode()

    def heard(self, answer: Answer) -> None:
        self._messages.append({"role": "assistant", "content": "".join(answer.text)})
        self._at += 1
