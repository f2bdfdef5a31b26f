"""What an engine's streams were told, so that another engine can go on behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cellar.server.pool.stream import Stream

MOST_TOKENS = 8192
"""So many are kept frame by frame; then they are dealt out to their streams."""


class History:
    """Kept a frame at a time, which costs one entry however many streams it tells of, and dealt out only when there are
    many, or when somebody must know: a stream that has ended meanwhile takes nothing.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[Sequence[str], Sequence[int]]] = []
        self._first = 0  # the number of the oldest frame that is kept
        self._num_tokens = 0

    @property
    def now(self) -> int:
        """The number of the next frame: a stream that begins now is told nothing by those before."""
        return self._first + len(self._frames)

    def add(self, ids: Sequence[str], tokens: Sequence[int], streams: Mapping[str, Stream[Any]]) -> None:
        """A frame: stream ids[k] was told tokens[k]. Both are kept as they are."""
        self._frames.append((ids, tokens))
        self._num_tokens += len(tokens)
        if self._num_tokens > MOST_TOKENS:
            self.deal(streams)

    def deal(self, streams: Mapping[str, Stream[Any]]) -> None:
        """Give the streams that there are what they were told."""
        number = self._first
        for ids, group in groupby(self._frames, key=lambda frame: frame[0]):
            frames = [tokens for _, tokens in group]
            if len(set(ids)) == len(ids):
                for id, told in zip(ids, zip(*frames, strict=True), strict=True):
                    if (stream := streams.get(id)) is not None:
                        stream.tokens.extend(told[max(0, stream.since - number) :])
            else:
                for k, tokens in enumerate(frames):
                    for id, token in zip(ids, tokens, strict=True):
                        if (stream := streams.get(id)) is not None and stream.since <= number + k:
                            stream.tokens.append(token)
            number += len(frames)
        self._first, self._frames, self._num_tokens = number, [], 0
