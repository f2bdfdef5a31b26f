"""Tails of one chunk: the longest that fits is found, in as many looks as there are lengths."""

from __future__ import annotations

import random

from cellar.kv.directory import Tails


class Counted(dict[bytes, int]):
    """Counts who asks."""

    looks = 0

    def get(self, key: bytes, default: int | None = None) -> int | None:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


def test_the_longest_tail_that_fits_is_found_whatever_comes_and_goes() -> None:
    draw = random.Random(3)
    tails, there = Tails(), dict[bytes, int]()
    for step in range(4000):
        tokens = bytes(draw.choices(b"ab", k=draw.randint(1, 9)))
        if tokens in there:
            tails.remove(tokens)
            del there[tokens]
        else:
            tails.add(tokens, step)
            there[tokens] = step
        asked = bytes(draw.choices(b"ab", k=draw.randint(0, 12)))
        fitting = [held for held in there if asked.startswith(held)]
        wanted = max(fitting, key=len, default=b"")
        assert tails.find(asked) == ((there[wanted], len(wanted)) if fitting else (-1, 0))
    for tokens in list(there):
        tails.remove(tokens)
    assert not tails.numbers
    assert not tails.lengths


def test_thousands_that_begin_alike_are_not_looked_through() -> None:
    """Conversations that end in the chunk behind one system prompt: an admission looked at each of them."""
    tails, length = Tails(), 31
    tails.numbers = counted = Counted()
    for number in range(5000):
        tails.add(number.to_bytes(4, "little") * (1 + number % length), number)
    assert tails.find((77).to_bytes(4, "little") * length) == (77, 4 * (1 + 77 % length))
    assert counted.looks <= length
