"""Lookup: asks a shared tier what other engines have written there; beside the loop, once for all who ask meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from cellar.core.messages import ChunkLabel

logger = logging.getLogger(__name__)

Found = Sequence[ChunkLabel]

_MOST = 4096
"""Names in one exchange; who asks for more in all waits for the next one."""


class SharedStorage(Protocol):
    """A tier that other engines write to, too."""

    @property
    def is_open(self) -> bool:
        """Whether it answers at the moment."""

    def find(self, wanted: Sequence[ChunkLabel], parents: Sequence[bytes]) -> Found:
        """Which of `wanted` are there, and tails that follow any of `parents`; within a bound. Raises OSError."""

    def adopt(self, slots: Sequence[int], labels: Sequence[ChunkLabel]) -> None:
        """Slots stand for chunks of other engines from now on. Never blocks."""


class _Question:
    def __init__(self, labels: Found, parents: Sequence[bytes], then: Callable[[Found], None]) -> None:
        self.labels, self.parents, self.then = labels, parents, then


class Lookup:
    """One thread over a `storage`."""

    def __init__(self, storage: SharedStorage) -> None:
        self._storage = storage
        self._waiting: list[_Question] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cellar-lookup", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """False while asking would bring nothing."""
        return self._storage.is_open and not self._closed

    def ask(self, labels: Found, parents: Sequence[bytes], then: Callable[[Found], None]) -> None:
        """`then` is called, in another thread, with what is there; with nothing if that cannot be known in time."""
        with self._changed:
            self._waiting.append(_Question(labels, parents, then))
            self._changed.notify()

    def adopt(self, slots: Sequence[int], labels: Found) -> None:
        """Slots of the tier stand for chunks that were found. Never blocks."""
        self._storage.adopt(slots, labels)

    def close(self) -> None:
        """Ask no more; who still waits hears that nothing is there."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                questions = self._take()
                if not questions:
                    return
            self._answer(questions)

    def _take(self) -> list[_Question]:
        """The first ones that fit into one exchange."""
        count = total = 0
        for question in self._waiting:
            total += len(question.labels) + len(question.parents)
            if count and total > _MOST:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _answer(self, questions: Sequence[_Question]) -> None:
        wanted = {label.identity: label for question in questions for label in question.labels}
        parents = list(dict.fromkeys(parent for question in questions for parent in question.parents))
        try:
            found = self._storage.find(list(wanted.values()), parents) if not self._closed else ()
        except Exception as error:  # whatever it is, somebody waits
            logger.debug("what others have written is not known: %s", error)
            found = ()
        whole = {label.identity for label in found if not label.tokens}
        tails = {label.parent: label for label in found if label.tokens}
        for question in questions:
            mine = [label for label in question.labels if label.identity in whole]
            question.then(mine + [tails[parent] for parent in question.parents if parent in tails])
