from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conversations.postgres import Cluster, cluster


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """One PostgreSQL for all tests of a run."""
    with cluster() as made:
        yield made


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store may be opened: an empty directory, or an empty PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "data")
    made: Cluster = request.getfixturevalue("postgres")
    made.empty()
    return made.url
