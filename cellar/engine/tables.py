"""Log-probability tables that are kept as arrays, and made where somebody reads them.

A table of 21 entries is 4 KB of objects; as arrays it is 180 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, overload

from cellar.core.messages import Logprobs, TokenLogprob

LogprobTable = dict[int, TokenLogprob]

_NONE = -1


class LogprobStore:
    """Of one sequence, or one prompt: per place the token, its log-probability and rank, and the `num_top` best.

    `text_of` a token, or None without a tokenizer. One thread appends, others may read what is there.
    """

    def __init__(self, num_top: int, text_of: Callable[[int], str | None]) -> None:
        self._num_top = num_top
        self._text_of = text_of
        self._tokens, self._ranks, self._logprobs = array("i"), array("i"), array("f")
        self._top_ids, self._top_logprobs = array("i"), array("f")

    def __len__(self) -> int:
        return len(self._tokens)

    def append_none(self) -> None:
        """A place without a table."""
        self._tokens.append(_NONE)
        self._ranks.append(0)
        self._logprobs.append(0.0)
        self._top_ids.extend([0] * self._num_top)
        self._top_logprobs.extend([0.0] * self._num_top)

    def append(self, logprobs: Logprobs, entry: int, token: int) -> float:
        """The place of `token` -> its log-probability."""
        top = self._num_top
        logprob = float(logprobs.logprob[entry])
        if top:
            self._top_ids.frombytes(_padded(logprobs.top_ids[entry, :top], top, "int32"))
            self._top_logprobs.frombytes(_padded(logprobs.top_logprobs[entry, :top], top, "float32"))
        self._ranks.append(int(logprobs.rank[entry]))
        self._logprobs.append(logprob)
        self._tokens.append(token)  # last: who reads goes by their number
        return logprob

    def table(self, place: int) -> LogprobTable | None:
        """The chosen token, then the best; ranks count from 1. None where there is none, or none yet."""
        if place >= len(self._tokens) or (token := self._tokens[place]) == _NONE:
            return None
        first = place * self._num_top
        table = {token: TokenLogprob(self._logprobs[place], self._ranks[place] + 1, self._text_of(token))}
        for k in range(first, first + self._num_top):
            other = self._top_ids[k]
            if other not in table and other != _NONE:
                table[other] = TokenLogprob(self._top_logprobs[k], k - first + 1, self._text_of(other))
        return table

    def best(self, place: int) -> tuple[float, array[int], array[float]] | None:
        """What a table says, without its objects: the chosen token's log-probability, the best tokens and theirs."""
        if place >= len(self._tokens) or self._tokens[place] == _NONE:
            return None
        first = place * self._num_top
        top = self._top_ids[first : first + self._num_top]
        stop = first + (top.index(_NONE) if _NONE in top else self._num_top)
        return self._logprobs[place], self._top_ids[first:stop], self._top_logprobs[first:stop]


class LogprobTables(Sequence[LogprobTable | None]):
    """Places [start, stop) of a store; it stays as it is when the store grows."""

    __slots__ = ("_start", "_stop", "_store")

    def __init__(self, store: LogprobStore, start: int = 0, stop: int | None = None) -> None:
        self._store = store
        self._start = start
        self._stop = len(store) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    def until(self, later: LogprobTables) -> LogprobTables:
        """These places, and those up to the end of `later` ones of the same store."""
        return LogprobTables(self._store, self._start, later._stop)

    def best(self, place: int) -> tuple[float, array[int], array[float]] | None:
        """As the store's `best`, of one of these places."""
        return self._store.best(self._start + place)

    @overload
    def __getitem__(self, place: int) -> LogprobTable | None: ...

    @overload
    def __getitem__(self, place: slice) -> list[LogprobTable | None]: ...

    def __getitem__(self, place: int | slice) -> LogprobTable | list[LogprobTable | None] | None:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"place {place} of {len(self)} tables")
        return self._store.table(self._start + place % len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def _padded(row: Any, count: int, kind: str) -> bytes:
    """The bytes of a row; a vocabulary may have fewer than `count` tokens."""
    data: bytes = row.astype(kind).tobytes()
    return data + b"\xff\xff\xff\xff" * (count - len(row))
