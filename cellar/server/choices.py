"""Log-probabilities as OpenAI writes them: one form for completions, another for chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from cellar.core.messages import RequestOutput, TokenLogprob
from cellar.engine.tables import LogprobTables
from cellar.server.pieces import lazily
from cellar.text.tokenizer import Tokenizer

Table = dict[int, TokenLogprob]
Tables = Sequence[Table | None]

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_SPELT_TOKENS = 4096
"""Of how many tokens a stream keeps what is written of them; about a megabyte."""


def completion_logprobs(
    ids: Sequence[int], parts: Sequence[Tables], num_top: int, offset: int, unscored: str = ""
) -> dict[str, Any]:
    """Parallel lists: tokens, their log-probabilities, the best of each place, offsets in the text from `offset` on.

    The tables are those of all `parts`, one after another. `unscored` is the text of a token without a table, the first
    one of a prompt.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    offsets: list[int] = []
    for id, table in zip(ids, chain(*parts), strict=True):
        text = unscored if table is None else table[id].decoded_token or ""
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(None if table is None else _finite(table[id].logprob))
    best = (
        {t.decoded_token or "": _finite(t.logprob) for t in table.values()} if table else None
        for table in chain(*parts)
    )
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": lazily(best, len(ids) * (num_top + 1)) if num_top else None,
        "text_offset": offsets,
    }


def chat_logprobs(ids: Sequence[int], tables: Tables, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry per token, each with the `num_top` best of its place."""

    def place(id: int, table: Table) -> dict[str, Any]:
        best = sorted(table.items(), key=lambda item: item[1].rank or 0)[:num_top]
        return {**_entry(id, table[id], tokenizer), "top_logprobs": [_entry(t, entry, tokenizer) for t, entry in best]}

    content = (place(id, table) for id, table in zip(ids, tables, strict=True) if table is not None)
    return {"content": lazily(content, 4 * len(ids) * (num_top + 1)), "refusal": None}


class SpeltLogprobs:
    """`chat_logprobs` of a stream, written as JSON at once: what never changes of a token is kept.

    Nine digits name a float of 32 bits.
    """

    def __init__(self, num_top: int, tokenizer: Tokenizer) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._around = lru_cache(_SPELT_TOKENS)(self._spelt)

    def __call__(self, ids: Sequence[int], tables: LogprobTables | None) -> str:
        """The entries of `ids`, one for each that has a table."""
        around, count = self._around, self._num_top
        places = []
        for k, id in enumerate(ids):
            if tables is not None and (found := tables.best(k)) is not None:
                logprob, top, logprobs = found
                before, after = around(id)
                spelt = zip(map(around, top[:count]), logprobs, strict=False)
                best = ",".join([f"{b}{max(x, FLOOR):.9g}{a}}}" for (b, a), x in spelt])
                places.append(f'{before}{max(logprob, FLOOR):.9g}{after},"top_logprobs":[{best}]}}')
        return f'{{"content":[{",".join(places)}],"refusal":null}}'

    def _spelt(self, id: int) -> tuple[str, str]:
        """What stands before a token's log-probability, and what behind it."""
        text, data = self._tokenizer.id_to_text(id), self._tokenizer.id_to_bytes(id)
        return f'{{"token":{json.dumps(text)},"logprob":', f',"bytes":{json.dumps(list(data), separators=(",", ":"))}'


def plain_tables(tables: Tables, num_top: int) -> list[Any] | Iterator[Any]:
    """Tables of a prompt as vLLM writes them."""
    return lazily(map(plain_table, tables), 4 * len(tables) * (num_top + 1))


def plain_table(table: Table | None) -> dict[str, Any] | None:
    """A table as vLLM writes prompt log-probabilities: token id -> logprob, rank, text."""
    if table is None:
        return None
    return {
        str(id): {"logprob": _finite(t.logprob), "rank": t.rank, "decoded_token": t.decoded_token}
        for id, t in table.items()
    }


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """OpenAI's account of a request; `reasoning_tokens` of those completed, if the model thinks apart."""
    account: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        account["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return account


def usage_of(outputs: Sequence[RequestOutput], scores_only: bool = False, reasons: bool = False) -> dict[str, Any]:
    """The account of whole requests."""
    made = 0 if scores_only else sum(len(c.token_ids) for output in outputs for c in output.outputs)
    thought = sum(c.num_reasoning_tokens for output in outputs for c in output.outputs) if reasons else None
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        made,
        sum(o.num_cached_tokens for o in outputs),
        thought,
    )


def _entry(id: int, logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token or "",
        "logprob": _finite(logprob.logprob),
        "bytes": list(tokenizer.id_to_bytes(id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
