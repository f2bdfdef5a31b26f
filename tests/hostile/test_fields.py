"""What a stranger may write into the files of a model ends in a sentence, or does no harm."""

from __future__ import annotations

import pytest

from cellar.core.errors import CheckpointError
from tests.hostile.fields import KINDS, search


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_field_with_every_wrong_value(each: int) -> None:
    counts, wrong = search(each=each)
    assert not wrong, wrong[:10]
    for kind in KINDS:
        assert counts[f"{kind}: refused"] > 0
        assert counts[f"{kind}: works"] > 0


def test_a_long_value_is_not_repeated_whole() -> None:
    assert str(CheckpointError("short.")) == "short."
    long = str(CheckpointError(f"name {'x' * 5000} is wrong; take another one."))
    assert len(long) < 1000
    assert long.startswith("name xxx")
    assert long.endswith("is wrong; take another one.")
