"""Encrypted reasoning: opened by the same key for the same owner, and by nobody else."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellar.core.errors import ConfigError
from cellar.server.errors import ApiError
from cellar.server.responses.sealing import KEY_FILE, Seal


def test_it_opens_again_for_its_owner(tmp_path: Path) -> None:
    sealed = Seal.of(tmp_path / "new").seal("Hm. é", "ann")
    again = Seal.of(tmp_path / "new")
    assert again.open(sealed, "ann") == "Hm. é"
    assert again.seal("Hm. é", "ann") != sealed
    for other in (Seal.of(tmp_path / "other"), again):
        with pytest.raises(ApiError) as found:
            other.open(sealed, "bob")
        assert found.value.code == "invalid_encrypted_content"
    for k in range(0, len(sealed), 7):
        broken = sealed[:k] + ("A" if sealed[k] != "A" else "B") + sealed[k + 1 :]
        with pytest.raises(ApiError):
            again.open(broken, "ann")


def test_one_key_however_many_come_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        seals = list(pool.map(lambda _: Seal.of(tmp_path), range(8)))
    assert {seal.open(seals[0].seal("x", ""), "") for seal in seals} == {"x"}
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_a_broken_key_is_said(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        Seal.of(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept"):
        Seal.of(tmp_path / "file")
