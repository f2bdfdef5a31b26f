"""A directory as a tier: what comes back after a restart, and what becomes of every kind of damage."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import ChunkLabel
from cellar.runtime.tiers import disk as disk_module
from cellar.runtime.tiers.disk import DiskTier
from cellar.runtime.tiers.index import RECORD_NBYTES
from tests.tier_chunks import NBYTES, chunk, comes_back, label

SLOT = 12_288  # of the file, for a chunk of NBYTES
WEIGHTS = b"w" * 16
SIZE = 40 * (SLOT + RECORD_NBYTES)


def opened(path: Path, size: int = SIZE, fingerprint: bytes = WEIGHTS, nbytes: int = NBYTES) -> DiskTier:
    return DiskTier(path, size, fingerprint, nbytes)


def fill(path: Path, count: int = 12) -> None:
    tier = opened(path)
    for k in range(count):
        tier.write(k, chunk(k), label(k))
    tier.close()


def found(tier: DiskTier) -> dict[int, ChunkLabel]:
    return {kept.slot: kept.label for kept in tier.kept()}


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    assert tier.num_slots == 40
    assert not tier.kept()
    tail = label(9, np.arange(5, dtype=np.int32).tobytes())
    tier.write(3, chunk(3), label(3))
    tier.write(30, chunk(9), tail)
    assert comes_back(tier, 3)
    tier.close()
    tier = opened(tmp_path)
    assert found(tier) == {3: label(3), 30: tail}
    assert comes_back(tier, 3)
    assert comes_back(tier, 30, 9)
    assert all(0 <= kept.age < 600 for kept in tier.kept())
    tier.close()


def test_killed_in_the_middle_keeps_what_was_written(tmp_path: Path) -> None:
    """No close, no flush: the process is gone. The chunk that was being overwritten is nobody's."""
    code = f"""
import os, signal
from tests.runtime.tiers.test_disk import *
tier = opened(Path({str(tmp_path)!r}))
for k in range(6):
    tier.write(k, chunk(k), label(k))
write = os.pwritev
def torn(file, data, offset):
    write(file, [data[0][:4096]], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwritev = torn
tier.write(2, chunk(20), label(20))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    tier = opened(tmp_path)
    assert sorted(found(tier)) == [0, 1, 3, 4, 5]
    assert all(comes_back(tier, k) for k in (0, 1, 3, 4, 5))
    tier.close()


def test_what_was_erased_is_gone_and_so_are_its_bytes(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = opened(tmp_path)
    tier.erase(4)
    tier.erase(39)  # a segment that was never needed
    assert not comes_back(tier, 4)
    tier.close()
    assert chunk(4)[:64].tobytes() not in b"".join(path.read_bytes() for path in tmp_path.rglob("segment-*"))
    tier = opened(tmp_path)
    assert sorted(found(tier)) == [k for k in range(12) if k != 4]
    tier.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path, at: int) -> None:
    os.truncate(path, at)


# Where it hurts: (file, what is done to it, slots that are lost).
DAMAGE: dict[str, tuple[str, Callable[[Path], None], set[int]]] = {
    "flipped bit in a chunk": ("segment-00000", lambda p: flip(p, 2 * SLOT + 77), {2}),
    "flipped bit in a record": ("index", lambda p: flip(p, 5 * RECORD_NBYTES + 60), {5}),
    "flipped bit in a checksum": ("index", lambda p: flip(p, 6 * RECORD_NBYTES - 1), {5}),
    "segment cut short": ("segment-00001", lambda p: cut(p, SLOT + 100), {6, 7, 8, 9}),
    "segment gone": ("segment-00001", Path.unlink, {5, 6, 7, 8, 9}),
    "index cut short": ("index", lambda p: cut(p, 3 * RECORD_NBYTES + 9), set(range(3, 12))),
    "index gone": ("index", Path.unlink, set(range(12))),
    "header of something else": ("header.json", lambda p: p.write_text("{}") and None, set(range(12))),
    "header no text": ("header.json", lambda p: p.write_bytes(b"\xff\xfe") and None, set(range(12))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_the_rest_is_there(name: str, tmp_path: Path) -> None:
    where, hurt, lost = DAMAGE[name]
    fill(tmp_path)
    (path,) = tmp_path.rglob(where)
    hurt(path)
    tier = opened(tmp_path)
    there = found(tier)
    got = {k for k in range(12) if k in there and comes_back(tier, k)}
    assert got == set(range(12)) - lost
    refused = sum(k in there for k in lost)
    assert tier.num_damaged >= refused
    tier.write(1, chunk(31), label(31))
    assert comes_back(tier, 1, 31), "it goes on"
    tier.close()


def test_slot_that_holds_another_chunk_is_not_read(tmp_path: Path) -> None:
    fill(tmp_path)
    tier = opened(tmp_path)
    with pytest.raises(OSError, match="does not hold the chunk"):
        tier.read(3, np.zeros(NBYTES, np.uint8), label(4))
    tier.close()


def test_second_engine_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by another engine \(process {os.getpid()}\); give each engine"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        opened(tmp_path, fingerprint=b"x" * 16)
    tier.close()
    opened(tmp_path).close()


def test_other_weights_and_other_sizes_never_meet(tmp_path: Path) -> None:
    fill(tmp_path)
    other = opened(tmp_path, fingerprint=b"x" * 16)
    assert not other.kept()
    other.write(0, chunk(0), label(0))
    other.close()
    assert len(found(opened_and_closed(tmp_path))) == 12, "it is still there"
    assert not found(opened_and_closed(tmp_path, nbytes=2 * NBYTES)), "chunks of another size"
    assert not found(opened_and_closed(tmp_path)), "they were removed"


def opened_and_closed(path: Path, **more: Any) -> DiskTier:
    tier = opened(path, **more)
    tier.close()
    return tier


def test_oldest_makes_room_and_the_size_holds_for_all(tmp_path: Path) -> None:
    for name in (b"a", b"b", b"c"):
        tier = opened(tmp_path, fingerprint=name * 16)
        for k in range(15):
            tier.write(k, chunk(k), label(k))
        tier.close()
        os.utime(tmp_path / (name * 16).hex() / "index", (ord(name), ord(name)))
    assert disk_usage(tmp_path) <= SIZE + 3 * 8192
    there = sorted(bytes.fromhex(path.name)[:1] for path in tmp_path.iterdir() if path.is_dir())
    assert there == [b"b", b"c"]
    last = opened(tmp_path, fingerprint=b"c" * 16)
    for k in range(40):
        last.write(k, chunk(k), label(k))
    last.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [(b"c" * 16).hex()]
    assert disk_usage(tmp_path) == pytest.approx(SIZE, rel=0.02), "disk asked for is disk taken"


def disk_usage(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("segment-*")) + sum(
        file.stat().st_size for file in path.rglob("index")
    )


def test_another_size_keeps_what_fits(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for k in (0, 7, 39):
        tier.write(k, chunk(k), label(k))
    tier.close()
    small = opened(tmp_path, size=SIZE // 4)
    assert sorted(found(small)) == [0, 7]
    assert comes_back(small, 7)
    small.write(9, chunk(9), label(9))
    small.close()
    large = opened(tmp_path, size=2 * SIZE)
    assert sorted(found(large)) == [0, 7, 9]
    large.write(79, chunk(79), label(79))
    assert all(comes_back(large, k) for k in (0, 7, 9, 79))
    large.close()


def test_full_disk_loses_the_chunk_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    for k in range(5):
        tier.write(k, chunk(k), label(k))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            tier.write(5, chunk(5), label(5))
        assert len(list(tmp_path.rglob("segment-*"))) == 1, "no half a segment"
        patch.setattr(os, "pwritev", lambda file, data, offset: 4096)
        with pytest.raises(OSError, match="4096 of 12288 bytes"):
            tier.write(4, chunk(44), label(44))
        assert not comes_back(tier, 4)
        assert not comes_back(tier, 4, 44)
    assert all(comes_back(tier, k) for k in range(4))
    tier.write(5, chunk(5), label(5))
    assert comes_back(tier, 5), "there is room again"
    tier.close()


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_disk_size asks for 1.05e\+06 GiB at .* are free there"):
        opened(tmp_path, size=2**50)
    with pytest.raises(CapacityError, match=r"but one chunk takes 12\.5 KiB of disk"):
        opened(tmp_path, size=1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "file")
    opened(tmp_path).close()  # no lock is left behind


def test_file_systems_without_direct_access_work_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def picky(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, mode)

    monkeypatch.setattr(disk_module.os, "open", picky)
    fill(tmp_path)
    tier = opened(tmp_path)
    assert all(comes_back(tier, k) for k in range(12))
    assert not tier.direct
    tier.close()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    fill(tmp_path / "kv")
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.name == "header.json", path
    header = json.loads(next(tmp_path.rglob("header.json")).read_text())
    assert header["fingerprint"] == WEIGHTS.hex()
