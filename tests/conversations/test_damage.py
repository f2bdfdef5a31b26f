"""Files that are no database any more, and directories that cannot be written: clear errors, and no other harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cellar.conversations import conversations
from cellar.conversations.database import FILE
from cellar.conversations.errors import StoreUnavailable
from cellar.conversations.store import open_store
from tests.limits import SECONDS, run_python


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    text = b"Dear diary, today the cellar was cold. " * 300
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(StoreUnavailable, match="damaged or no database"):
        open_store(tmp_path, sweep_seconds=None)
    assert (tmp_path / FILE).read_bytes() == text, "it is somebody's"


READ_ONLY = """
import os, sys
from pathlib import Path
from cellar.conversations import conversations
from cellar.conversations.errors import StoreUnavailable
from cellar.conversations.store import open_store
from cellar.core.errors import ConfigError

folder = Path(sys.argv[1])
with open_store(folder / "other", sweep_seconds=None) as store:  # imports all that there is
    store.write(conversations.create, "a", "c", {})
if os.geteuid() == 0:
    os.seteuid(65534)
for name in ("empty", "full"):
    try:
        open_store(folder / name, sweep_seconds=None)
        print("opened")
    except (ConfigError, StoreUnavailable) as error:
        print(type(error).__name__, error)
"""


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    open_store(tmp_path / "full", sweep_seconds=None).close()
    for folder in (tmp_path, *tmp_path.parents[:2]):  # to reach it is allowed
        os.chmod(folder, 0o755)
    for folder in (tmp_path / "empty", tmp_path / "full"):
        os.chmod(folder, 0o555)
    said = run_python(READ_ONLY, str(tmp_path)).splitlines()
    for folder in (tmp_path / "empty", tmp_path / "full"):
        os.chmod(folder, 0o755)
    assert len(said) == 2
    assert all("data directory" in line and "Permission denied" in line for line in said), said


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_goes_away_while_it_is_open_is_noticed(tmp_path: Path, how: str) -> None:
    path, aside = tmp_path / FILE, tmp_path / "aside"
    with open_store(tmp_path, sweep_seconds=None) as store:
        store.write(conversations.create, "a", "before", {})
        path.rename(aside)
        if how == "replaced":
            path.write_bytes(b"another")
        several = [store.submit(conversations.create, "a", f"lost-{k}", {}) for k in range(3)]
        for future in several:
            with pytest.raises(StoreUnavailable, match=f"was {how} while it was open"):
                future.result(SECONDS)
        with pytest.raises(StoreUnavailable, match=how):
            store.sweep()
        aside.rename(path)
        store.write(conversations.create, "a", "after", {})
    with open_store(tmp_path, sweep_seconds=None) as store:
        assert {one.id for one in store.read(conversations.page, "a").records} == {"before", "after"}
