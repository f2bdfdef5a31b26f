"""Data and arrivals of the cells benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cells.arrivals import poisson
from benchmarks.cells.lengths import lengths_from, wikitext_lengths, wmt_like, wmt_like_pairs
from benchmarks.cells.trees import complete, depths, parse, read_trees, treebank_like, vocabulary
from cellar.core.errors import ConfigError


def test_lengths_are_those_of_the_paper() -> None:
    lengths = wmt_like(100_000, np.random.default_rng(1))
    assert abs(lengths.mean() - 24) < 0.3
    assert abs(np.percentile(lengths, 99) - 100) <= 3
    assert lengths.min() >= 1
    assert 250 < lengths.max() <= 330
    assert wmt_like(10_000, np.random.default_rng(1), longest=50).max() <= 50


def test_pairs_are_alike() -> None:
    source, target = wmt_like_pairs(50_000, np.random.default_rng(2))
    for side in (source, target):
        assert abs(side.mean() - 24) < 0.4
    assert 0.2 < np.std(np.log(source / target)[source > 10]) < 0.3


def test_sources_of_lengths(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assert set(lengths_from("fixed-7", 5, rng)) == {7}
    assert set(lengths_from("fixed", 5, rng)) == {24}
    assert lengths_from("wmt-50", 5000, rng).max() <= 50
    text = tmp_path / "text"
    text.write_text(
        " \n = Heading . = \n \n One two . Three @.@ four five . \n Six seven\u00a0eight \n", encoding="utf-8"
    )
    assert wikitext_lengths(text).tolist() == [3, 5, 2]
    assert set(lengths_from(str(text), 50, rng)) == {2, 3, 5}
    with pytest.raises(ConfigError, match="not there"):
        lengths_from("wnt", 5, rng)


def test_trees_are_read_in_order_of_evaluation() -> None:
    tree = parse("(3 (2 (1 A) (2 8\u00a01\\/2))   (4 (2 b) (2 c) (0 d) )  )")
    assert tree.nested() == (("A", "8\u00a01\\/2"), ("b", "c", "d"))
    assert all(child < node for node, below in enumerate(tree.children) for child in below)
    assert (tree.num_leaves, tree.binary) == (5, False)
    assert max(depths(tree.children)) == 2
    assert parse("(2 word)").nested() == "word"


@pytest.mark.parametrize(
    "line", ["", "(3", "(3 a", "(3 a))", "(3 )", "3 a", "(3 a) (2 b)", "(3 (2 a) b)", "(3 a b)", "(3 a (2 b))"]
)
def test_broken_brackets_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="bracketed tree"):
        parse(line)


def test_files_of_trees(tmp_path: Path) -> None:
    path = tmp_path / "trees"
    path.write_text("(3 (2 Fine) (2 .))\n(2 (2 a) (2 Fine))\n", encoding="utf-8")
    assert vocabulary(read_trees(path)) == {"Fine": 0, ".": 1, "a": 2}
    with pytest.raises(ConfigError, match="not there"):
        read_trees(tmp_path / "none")


def test_made_trees() -> None:
    tree = complete(16)
    assert (tree.num_leaves, len(tree.words), max(depths(tree.children))) == (16, 31, 4)
    with pytest.raises(ConfigError):
        complete(12)
    trees = treebank_like(2000, np.random.default_rng(3))
    assert all(tree.binary and len(tree.words) == 2 * tree.num_leaves - 1 for tree in trees)
    assert abs(np.mean([tree.num_leaves for tree in trees]) - 19.4) < 0.7
    assert abs(np.mean([max(depths(tree.children)) for tree in trees]) - 9.6) < 0.5


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson(500.0, 100.0, seed=4)
    assert abs(len(times) - 50_000) < 5 * 50_000**0.5
    gaps = np.diff(times)
    assert abs(gaps.std() / gaps.mean() - 1) < 0.02  # exponential: as wide as its mean
    assert (gaps >= 0).all()
    assert times[-1] < 100
    assert np.allclose(poisson(250.0, 200.0, seed=4), 2 * times)  # the same luck at another speed
    with pytest.raises(ConfigError):
        poisson(0.0, 1.0, 0)
