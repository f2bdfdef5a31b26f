"""IncrementalTokenizer: of a text whose beginning was tokenized before, only the rest is.

A conversation comes back with every turn, a little longer. Its text is divided into blocks, and is cut at the first
safe place (`cuts.py`) of each; the ids up to a cut are kept under the hash of the text before it. The last cut that is
known is where tokenizing begins:

    |-- block 0 --|-- block 1 --|-- block 2 --|-- block 3 --
    ----------------^-------------^-----------------^-------   cuts; the ids between two are one entry
                                  known            new

So the work for a turn is that of what is new and at most about two blocks, whatever came before; of that only the hash
is made. The ids are those of the whole text, with a cache or without one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cellar.text.cuts import MAX_LENGTH
from cellar.text.tokenizer import IntArray, Tokenizer

BLOCK = 2048
ENTRY_BYTES = 300
"""What an entry takes beside its ids."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The ids between the cut `before` (a key; None: the beginning) and the next."""

    before: bytes | None
    ids: IntArray


@dataclass(slots=True)
class TokenizingStats:
    """Characters of texts, and those of them that were tokenized."""

    characters: int = 0
    tokenized: int = 0


class IncrementalTokenizer:
    """A tokenizer with a memory of `max_bytes`; least recently used parts leave it first. For many threads.

    `block` is the length of a block in characters.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = 64 * 2**20, block: int = BLOCK) -> None:
        self._tokenizer = tokenizer
        self._block = block
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._parts: OrderedDict[bytes, _Part] = OrderedDict()
        self._bytes = 0
        self.stats = TokenizingStats()

    def encode(self, text: str, salt: bytes = b"") -> IntArray:
        """The ids of a text without special tokens around it: int32 [n], those of `Tokenizer.encode`.

        What is remembered is found again under the same `salt` only: how long it takes tells nobody else of a text.
        """
        begin, before, head, cuts = self._known(text, salt)
        places = [begin, *(cut for cut, _ in cuts), len(text)]
        texts = [text[a:b] for a, b in pairwise(places)]
        found = self._tokenizer.encode_all(texts)
        with self._guard:
            self.stats.characters += len(text)
            self.stats.tokenized += len(text) - begin
            for (_, key), ids in zip(cuts, found[:-1], strict=True):
                self._keep(key, _Part(before, ids))
                before = key
            self._used(before)
            while self._bytes > self._max_bytes:
                _, part = self._parts.popitem(last=False)
                self._bytes -= part.ids.nbytes + ENTRY_BYTES
        return np.concatenate([*head, *found]) if head or len(found) > 1 else found[0]

    def take_stats(self) -> TokenizingStats:
        """What has been counted since the last time."""
        with self._guard:
            taken, self.stats = self.stats, TokenizingStats()
        return taken

    @property
    def num_bytes(self) -> int:
        """What is remembered."""
        return self._bytes

    def _known(self, text: str, salt: bytes) -> tuple[int, bytes | None, list[IntArray], list[tuple[int, bytes]]]:
        """The last cut that is known (where, its key, the ids before it), and the cuts behind it with their keys."""
        pattern, size, cuts = self._tokenizer.cuts, self._block, list[tuple[int, bytes]]()
        if pattern is None or len(text) <= size:
            return 0, None, [], cuts
        made, hashes = hashlib.sha256(hashlib.sha256(salt).digest()), []
        for begin in range(0, len(text) - size, size):
            made.update(_bytes(text[begin : begin + size]))
            hashes.append(made.copy())
        for k in range(len(hashes), 0, -1):
            begin = k * size
            match = pattern.search(text, begin, begin + size + MAX_LENGTH)
            if match is None or match.start() >= begin + size:
                continue
            made = hashes[k - 1]
            made.update(_bytes(text[begin : match.start()]))
            key = made.digest()
            with self._guard:
                if self._whole(key):
                    return match.start(), key, self._used(key), cuts[::-1]
            cuts.append((match.start(), key))
        return 0, None, [], cuts[::-1]

    def _whole(self, key: bytes) -> bool:
        """True if the part and all before it are known."""
        part = self._parts.get(key)
        while part is not None and part.before is not None:
            part = self._parts.get(part.before)
        return part is not None

    def _used(self, key: bytes | None) -> list[IntArray]:
        """The ids up to a cut, part by part; what comes first is the last to be forgotten."""
        found: list[IntArray] = []
        while key is not None:
            part = self._parts.get(key)
            if part is None:
                break
            self._parts.move_to_end(key)
            found.append(part.ids)
            key = part.before
        return found[::-1]

    def _keep(self, key: bytes, part: _Part) -> None:
        if key not in self._parts:
            self._parts[key] = part
            self._bytes += part.ids.nbytes + ENTRY_BYTES


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
