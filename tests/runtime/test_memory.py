"""What the system says of the processor's caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellar.runtime.memory import last_cache


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (["48K", "32K", "2048K", "307200K"], 300 * 2**20),
        (["32K", "16M"], 2**24),
        (["65536"], 65536),
        (["unknown", "512K"], 2**19),
        ([], 0),
    ],
)
def test_the_largest_cache_counts(sizes: list[str], found: int, tmp_path: Path) -> None:
    for k, size in enumerate(sizes):
        (tmp_path / f"index{k}").mkdir()
        (tmp_path / f"index{k}" / "size").write_text(size + "\n")
    assert last_cache(tmp_path) == found


def test_a_system_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert last_cache(tmp_path / "none") == 0
