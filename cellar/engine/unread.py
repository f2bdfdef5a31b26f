"""What a stream has not been told yet: the engine's thread has handed it over, the coroutine has not taken it."""

from __future__ import annotations

import asyncio
from collections import deque

from cellar.core.messages import RequestOutput
from cellar.engine.outputs import Delta

News = Delta | RequestOutput | BaseException


class Unread:
    """`put` and `get` are for one event loop, `get` for one coroutine at a time.

    Of each sequence there is one delta at most: what came while nobody took it is told with it, at once. So a front
    that has fallen behind its engine writes fewer events, not later and later ones. Of whole outputs so far there is
    the newest.
    """

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._deltas: dict[int, Delta] = {}  # those among them, by the sequence's index
        self._waiting: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        """There is more."""
        if isinstance(news, Delta) and news.finish_reason != "error":  # which is told alone: nobody reads its text
            unread = self._deltas.setdefault(news.index, news)
            if unread is not news:
                unread.join(news)
                return
        if isinstance(news, RequestOutput) and self._news and isinstance(self._news[-1], RequestOutput):
            self._news[-1] = news
            return
        self._news.append(news)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> News:
        """The oldest, when there is any."""
        while not self._news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        news = self._news.popleft()
        if isinstance(news, Delta):
            self._deltas.pop(news.index, None)
        return news
