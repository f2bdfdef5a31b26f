"""The ids that a turn goes on from, and those that it leaves for the next one (`cellar.text.continuation`)."""

from __future__ import annotations

import numpy as np

from cellar.conversations.records import History, Tokens
from cellar.core.messages import RequestOutput
from cellar.engine.prompts import Prompt
from cellar.server.prepare import Known, PreparedChat
from cellar.text.continuation import PromptText, answer_ids, thinking_ids
from cellar.text.tokenizer import Tokenizer


def known_of(history: History | None) -> Known | None:
    """The context of what came before, if it is kept."""
    tokens = None if history is None else history.tokens
    if tokens is None:
        return None
    answer = tokens.ids[len(tokens.ids) - tokens.num_answer :]
    return Known(tokens.ids, answer, PromptText(tokens.text_length, tokens.text_digest))


def tokens_of(
    history: History | None, chat: PreparedChat, output: RequestOutput, tokenizer: Tokenizer
) -> Tokens | None:
    """What a turn adds to the context; None if its ids do not stand for its text."""
    prompt: Prompt = chat.prompt
    (made,) = output.outputs
    if prompt.text is None:
        return None
    answer = (thinking_ids if made.reasoning else answer_ids)(tokenizer, made.token_ids, made.text)
    if answer is None:
        return None
    base, begin = None, 0
    if chat.continued and history is not None and history.tokens is not None:
        base, begin = history.tokens.base, len(history.tokens.ids)
    ids = np.concatenate((prompt.token_ids[begin:], answer)).astype(np.int32, copy=False)
    text = PromptText.of(prompt.text)
    return Tokens(ids, base, len(answer), text.length, text.digest)
