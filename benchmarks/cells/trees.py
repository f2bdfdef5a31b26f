"""Trees: the Stanford Sentiment Treebank's bracketed lines, and complete binary ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cellar.core.errors import ConfigError

Nested = str | tuple["Nested", ...]
"""A leaf's word, or the children of a node."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree in order of evaluation: children stand before their parents, the root last.

    words[k] is a leaf's word, or None; children[k] are the numbers of a node's children, () for a leaf.
    """

    words: tuple[str | None, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def num_leaves(self) -> int:
        """Words."""
        return sum(word is not None for word in self.words)

    @property
    def binary(self) -> bool:
        """True if every node has two children or none."""
        return all(len(children) in (0, 2) for children in self.children)

    def nested(self) -> Nested:
        """The tree as nested tuples; the root's."""
        made: list[Nested] = []
        for word, children in zip(self.words, self.children, strict=True):
            made.append(word if word is not None else tuple(made[child] for child in children))
        return made[-1]


_PIECES = re.compile(r"[()]|[^ ()\n]+")


@dataclass(slots=True)
class _Open:
    """A bracket that is not closed yet."""

    labelled: bool = False
    word: str | None = None
    children: list[int] = field(default_factory=list)


def _malformed(line: str) -> ConfigError:
    return ConfigError(f"{line[:60]!r} is no bracketed tree; lines look like (3 (2 Fine) (2 .)).")


def parse(line: str) -> Tree:
    """One line such as `(3 (2 Fine) (2 .))`. Raises ConfigError.

    Pieces end at brackets and ASCII blanks only: some words hold U+00A0, which `str.split()` would cut.
    """
    words: list[str | None] = []
    children: list[tuple[int, ...]] = []
    around: list[_Open] = []
    for piece in _PIECES.findall(line):
        if piece == "(":
            around.append(_Open())
        elif not around:
            raise _malformed(line)
        elif piece == ")":
            node = around.pop()
            if (node.word is None) == (not node.children):  # neither a word nor children, or both
                raise _malformed(line)
            words.append(node.word)
            children.append(tuple(node.children))
            if around:
                around[-1].children.append(len(words) - 1)
            elif len(words) != line.count("("):
                raise _malformed(line)
        elif not around[-1].labelled:
            around[-1].labelled = True
        elif around[-1].word is None:
            around[-1].word = piece
        else:
            raise _malformed(line)
    if around or not words:
        raise _malformed(line)
    return Tree(tuple(words), tuple(children))


def read_trees(path: Path) -> list[Tree]:
    """Every tree of a file, one a line. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there; give a file of bracketed trees, one a line.")
    return [parse(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def complete(num_leaves: int) -> Tree:
    """The complete binary tree with `num_leaves` (a power of two) leaves, the fixed input of figure 2.15."""
    if num_leaves < 1 or num_leaves & (num_leaves - 1):
        raise ConfigError(f"a complete binary tree has 1, 2, 4, ... leaves, not {num_leaves}.")
    words: list[str | None] = [f"w{k}" for k in range(num_leaves)]
    children: list[tuple[int, ...]] = [()] * num_leaves
    level = list(range(num_leaves))
    while len(level) > 1:
        above = range(len(words), len(words) + len(level) // 2)
        children += [(level[2 * k], level[2 * k + 1]) for k in range(len(above))]
        words += [None] * len(above)
        level = list(above)
    return Tree(tuple(words), tuple(children))


LEAVES_MEAN, LEAVES_SPREAD, LEAVES_MOST = 19.4, 9.3, 56
"""Words per sentence of the Sentiment Treebank: mean, standard deviation, maximum."""


def treebank_like(count: int, rng: np.random.Generator, vocab_size: int = 20_000) -> list[Tree]:
    """Random binary trees with as many leaves as the Sentiment Treebank's, and about as deep (mean 9.6; it has 9.9).

    Half of the nodes split off one word, as English sentences do; the others split anywhere.
    """
    shape = (LEAVES_MEAN / LEAVES_SPREAD) ** 2
    sizes = np.rint(rng.gamma(shape, LEAVES_MEAN / shape, count)).clip(2, LEAVES_MOST).astype(int)
    return [_random_tree(int(size), rng, vocab_size) for size in sizes]


def _random_tree(size: int, rng: np.random.Generator, vocab_size: int) -> Tree:
    words: list[str | None] = []
    children: list[tuple[int, ...]] = []

    def grow(num_leaves: int) -> int:
        below: tuple[int, ...] = ()
        if num_leaves > 1:
            left = 1 if rng.random() < 0.5 else int(rng.integers(1, num_leaves))
            below = (grow(left), grow(num_leaves - left))
        words.append(None if below else f"w{rng.integers(vocab_size)}")
        children.append(below)
        return len(words) - 1

    grow(size)
    return Tree(tuple(words), tuple(children))


def vocabulary(trees: Iterable[Tree]) -> dict[str, int]:
    """A number for every word, in order of appearance."""
    found: dict[str, int] = {}
    for tree in trees:
        for word in tree.words:
            if word is not None:
                found.setdefault(word, len(found))
    return found


def depths(children: Sequence[Sequence[int]]) -> list[int]:
    """Longest way from each node down to a leaf: nodes of one depth do not depend on each other."""
    found: list[int] = []
    for below in children:
        found.append(1 + max((found[child] for child in below), default=-1))
    return found
