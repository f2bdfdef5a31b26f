"""A Redis server as a tier: what comes back, what must not, and that nobody waits for a server that does not answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cellar.core.errors import CapacityError, ConfigError
from cellar.runtime.tiers import remote as remote_module
from cellar.runtime.tiers import sealed as sealed_module
from cellar.runtime.tiers.redis_link import SECONDS as BOUND
from cellar.runtime.tiers.redis_link import named
from cellar.runtime.tiers.remote import RemoteOptions, RemoteTier
from cellar.runtime.tiers.sealed import Seal
from tests.limits import SECONDS, until
from tests.network import way
from tests.redis_server import RedisServer, SlowRedis, redis_server
from tests.tier_chunks import NBYTES, chunk, comes_back, label

pytestmark = pytest.mark.long  # they need Debian's redis-server, see scripts/setup-system

WEIGHTS = b"w" * 16
KEY = "0123456789abcdef" * 2
SLOTS = 40
SIZE = SLOTS * (NBYTES + 1024)


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """Empty, and with a journal of its own; a busy machine's answers to a look-up come late and are waited for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(remote_module, "_LOOKUP_SECONDS", SECONDS / 4)
    with running.client as client:
        client.flushall()
    return running


@contextmanager
def opened(
    url: str,
    *,
    fingerprint: bytes = WEIGHTS,
    nbytes: int = NBYTES,
    key: str = KEY,
    ttl: float = 3600.0,
    size: int = SIZE,
) -> Iterator[RemoteTier]:
    tier = RemoteTier(RemoteOptions(url, key, size, ttl), fingerprint, nbytes)
    try:
        yield tier
    finally:
        tier.close()


def fill(tier: RemoteTier, count: int = 12) -> None:
    numbers = list(range(count))
    chunks = np.stack([chunk(k) for k in numbers])
    assert tier.write_many(numbers, chunks, [label(k) for k in numbers]) == [None] * count


def there(tier: RemoteTier) -> list[int]:
    """Numbers of the chunks of `fill` that come back, all asked for at once."""
    out = np.zeros((12, NBYTES), np.uint8)
    failed = tier.read_many(list(range(12)), out, [label(k) for k in range(12)])
    got = [k for k, error in enumerate(failed) if error is None]
    assert all(np.array_equal(out[k], chunk(k)) for k in got), "damage got through"
    return got


def test_what_was_written_is_there_for_the_next_engine(server: RedisServer) -> None:
    tail = label(9, np.arange(5, dtype=np.int32).tobytes())
    with opened(server.url) as tier:
        assert tier.num_slots > SLOTS - 2
        assert not tier.kept()
        tier.write(3, chunk(3), label(3))
        tier.write(30, chunk(9), tail)
        assert comes_back(tier, 3)
        assert tier.find([label(3), label(4)], [tail.parent, b"q" * 16]) == [label(3), tail]
    with opened(server.url) as tier:
        found = {kept.label.identity: kept for kept in tier.kept()}
        assert {kept.label for kept in found.values()} == {label(3), tail}
        assert all(0 <= kept.age < 600 for kept in found.values())
        assert comes_back(tier, found[label(3).identity].slot, 3)
        assert comes_back(tier, found[tail.identity].slot, 9)
    with server.client as client:
        assert all(0 < client.ttl(name) <= 3600 for name in client.keys("*"))


def test_what_users_wrote_cannot_be_read_there(server: RedisServer) -> None:
    with opened(server.url) as tier:
        tier.write(0, chunk(1), label(1, b"secret words"))
        with server.client as client:
            kept = b"".join(client.get(name) for name in client.keys("*"))
        assert b"secret" not in kept
        assert chunk(1)[:32].tobytes() not in kept


def _changed(at: int) -> Callable[[RedisServer, bytes], None]:
    def change(server: RedisServer, name: bytes) -> None:
        with server.client as client:
            entry = bytearray(client.get(name))
            entry[at] ^= 4
            client.set(name, bytes(entry))

    return change


def _set(change: Callable[[bytes, bytes], bytes]) -> Callable[[RedisServer, bytes], None]:
    """Replaced by a function of the entry and of another one."""

    def put(server: RedisServer, name: bytes) -> None:
        with server.client as client:
            other = next(one for one in server.chunks() if one != name)
            client.set(name, change(client.get(name), client.get(other)))

    return put


def _typed(server: RedisServer, name: bytes) -> None:
    with server.client as client:
        client.delete(name)
        client.rpush(name, b"of another type")


DAMAGE: dict[str, Callable[[RedisServer, bytes], None]] = {
    "a bit of the magic": _changed(0),
    "a bit of the chunk's salt": _changed(-NBYTES - 20),
    "a bit of the chunk": _changed(-NBYTES // 2),
    "a bit of the tag": _changed(-1),
    "cut short": _set(lambda entry, _: entry[: len(entry) // 2]),
    "cut to nothing": _set(lambda entry, _: b""),
    "longer": _set(lambda entry, _: entry + b"x"),
    "that of another chunk": _set(lambda _, other: other),
    "the chunk of another under its own label": _set(lambda entry, other: entry[:-NBYTES] + other[-NBYTES:]),
    "of another type": _typed,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_dropped_and_counted(name: str, server: RedisServer) -> None:
    with opened(server.url) as tier:
        fill(tier)
        DAMAGE[name](server, server.chunks()[5])
        assert there(tier) == [k for k in range(12) if k != 5]
        if name != "of another type":
            assert tier.num_damaged == 1
            assert len(server.chunks()) == 11, "it is not asked for again"


def test_a_label_that_was_changed_is_not_kept(server: RedisServer) -> None:
    with opened(server.url) as tier:
        fill(tier)
    _changed(60)(server, server.chunks()[5])
    with opened(server.url) as tier:
        assert sorted(kept.label.identity[0] for kept in tier.kept()) == [k for k in range(12) if k != 5]
        assert tier.num_damaged == 1


OTHERS: dict[str, dict[str, object]] = {
    "fingerprint": {"fingerprint": b"v" * 16},
    "key": {"key": KEY[::-1]},
    "chunk size": {"nbytes": NBYTES // 2, "fingerprint": b"u" * 16},
}


@pytest.mark.parametrize("name", OTHERS)
def test_entries_of_others_are_never_read(name: str, server: RedisServer) -> None:
    """Also where somebody has put them under the names of ours."""
    with opened(server.url) as tier:
        fill(tier)
    other = OTHERS[name]
    with opened(server.url, **other) as tier:  # type: ignore[arg-type]
        assert not tier.kept()
        mine = str(other.get("fingerprint", WEIGHTS)), str(WEIGHTS)
        if "fingerprint" in other:
            assert not tier.find([label(k) for k in range(12)], []), mine
            fingerprint = other["fingerprint"]
            assert isinstance(fingerprint, bytes)
            with server.client as client:
                for entry in server.chunks():
                    client.copy(entry, entry.replace(WEIGHTS.hex().encode(), fingerprint.hex().encode()))
        out = np.zeros((12, int(str(other.get("nbytes", NBYTES)))), np.uint8)
        failed = tier.read_many(list(range(12)), out, [label(k) for k in range(12)])
        assert all(failed)
        assert not out.any()
        assert tier.num_damaged >= 12


# -- planted bugs: without this the checks above could pass for nothing ---------------------------------


def _anything_opens(patch: pytest.MonkeyPatch) -> None:
    """No authentication: what comes is taken as it is, by its length."""

    def seal(_: Seal, data: bytes, bound: bytes) -> bytes:
        return bytes(16) + bytes(data) + bytes(16)

    patch.setattr(Seal, "seal", seal)
    patch.setattr(Seal, "open", lambda _, sealed, bound: bytes(sealed)[16:-16])


def _names_do_not_count(patch: pytest.MonkeyPatch) -> None:
    before_seal, before_open = Seal.seal, Seal.open
    patch.setattr(Seal, "seal", lambda seal, data, bound: before_seal(seal, data, b""))
    patch.setattr(Seal, "open", lambda seal, sealed, bound: before_open(seal, sealed, b""))


def _fingerprints_do_not_count(patch: pytest.MonkeyPatch) -> None:
    before = Seal.__init__
    patch.setattr(Seal, "__init__", lambda seal, key, fingerprint: before(seal, key, b""))


def _keys_do_not_count(patch: pytest.MonkeyPatch) -> None:
    before = Seal.__init__
    patch.setattr(Seal, "__init__", lambda seal, key, fingerprint: before(seal, "k" * 32, fingerprint))


PLANTED = {
    "no authentication": (_anything_opens, lambda s: test_damage_is_found_dropped_and_counted("a bit of the chunk", s)),
    "names": (_names_do_not_count, lambda s: test_damage_is_found_dropped_and_counted("that of another chunk", s)),
    "fingerprints": (_fingerprints_do_not_count, lambda s: test_entries_of_others_are_never_read("fingerprint", s)),
    "keys": (_keys_do_not_count, lambda s: test_entries_of_others_are_never_read("key", s)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(server)


# -- bounds -------------------------------------------------------------------------------------------


def test_what_loses_its_slot_is_deleted_by_who_wrote_it(server: RedisServer) -> None:
    with opened(server.url) as mine, opened(server.url) as other:
        fill(mine)
        other.write(0, chunk(4), label(4))  # the same chunk, written again by another engine
        mine.write(3, chunk(20), label(20))
        mine.write(4, chunk(21), label(21))
        assert not comes_back(mine, 3)
        assert comes_back(other, 0, 4), "it is the other's now"
        other.adopt([7], [label(5)])
        other.write(7, chunk(22), label(22))
        assert comes_back(mine, 5), "who has only found it does not delete it"
        assert len(server.chunks()) == 14
        mine.adopt([6], [label(22)])
        until(lambda: not other.find([label(6)], []))


def test_entries_of_an_engine_that_is_gone_are_inherited(server: RedisServer) -> None:
    with opened(server.url) as tier:
        fill(tier)
        with opened(server.url) as beside:
            assert len(beside.kept()) == 12
            beside.write(beside.kept()[0].slot, chunk(20), label(20))
            assert len(server.chunks()) == 13, "its writer is there, and sees to it"
    with opened(server.url, size=8 * (NBYTES + 1024)) as tier:
        assert 7 <= len(tier.kept()) == tier.num_slots <= 9, "no more than its size"
        slot, gone = tier.kept()[3].slot, tier.kept()[3].label.identity
        tier.write(slot, chunk(21), label(21))
        assert not any(gone.hex().encode() in name for name in server.chunks())


def test_a_server_that_drops_what_it_wants(server: RedisServer) -> None:
    """Redis full, with and without leave to evict: what is gone is a hole, what is not taken was not written."""
    with redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as small, opened(small.url) as tier:
        for k in range(200):
            tier.write(k % tier.num_slots, chunk(k), label(k))
        with small.client as client:
            client.config_set("maxmemory", "1500kb")
        last = {slot: max(k for k in range(200) if k % tier.num_slots == slot) for slot in range(tier.num_slots)}
        got = [comes_back(tier, slot, k) for slot, k in last.items()]
        assert not all(got)
        assert tier.num_damaged == 0, "what is gone is not damage"
        assert tier.is_open
        with small.client as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "100kb")
        failed = tier.write_many([0, 1], np.stack([chunk(1), chunk(2)]), [label(1), label(2)])
        assert all("does not take it" in str(error) for error in failed)
        assert tier.is_open


def test_time_to_live(server: RedisServer) -> None:
    with opened(server.url, ttl=1.0) as tier:
        fill(tier)
        until(lambda: not server.chunks())
        assert there(tier) == []


# -- a server that is away ----------------------------------------------------------------------------


def test_killed_and_restarted(server: RedisServer) -> None:
    with redis_server() as own, opened(own.url) as tier:
        fill(tier)
        own.kill()
        assert there(tier) == []
        assert not tier.is_open
        begin = time.monotonic()
        for _ in range(100):
            assert not comes_back(tier, 1)
            with pytest.raises(OSError, match="away"):
                tier.write(1, chunk(1), label(1))
        assert time.monotonic() - begin < 60, "nobody connects for each of them"
        own.start()
        until(lambda: tier.is_open)
        assert there(tier) == []
        fill(tier)
        assert there(tier) == list(range(12))


def test_away_at_the_start(server: RedisServer) -> None:
    with redis_server() as own:
        own.kill()
        with opened(own.url) as tier:
            assert not tier.kept()
            assert not comes_back(tier, 1)
            own.start()
            until(lambda: tier.is_open)
            fill(tier)
            assert there(tier) == list(range(12))


def test_a_server_that_hangs_is_waited_for_once(server: RedisServer) -> None:
    with redis_server() as own, opened(own.url) as tier:
        fill(tier)
        own.signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert there(tier) == []
        waited = time.monotonic() - begin
        assert waited >= BOUND / 2
        begin = time.monotonic()
        assert not any(comes_back(tier, k) for k in range(12))
        assert time.monotonic() - begin < max(waited, BOUND), "only the first has waited"
        own.signal(signal.SIGCONT)
        until(lambda: tier.is_open)
        assert there(tier) == list(range(12))


def test_a_server_that_is_cut_off_is_waited_for_once_and_nothing_of_it_is_lost(server: RedisServer) -> None:
    """Its packets vanish, and so do those that would make a new connection."""
    with redis_server() as own, way(own.socket) as far, opened(f"redis://127.0.0.1:{far.port}") as tier:
        fill(tier)
        far.cut()
        assert there(tier) == []
        assert not tier.is_open
        begin = time.monotonic()
        assert not any(comes_back(tier, k) for k in range(12))
        assert time.monotonic() - begin < 12 * BOUND / 2, "only the first has waited"
        far.heal()
        until(lambda: tier.is_open)
        assert there(tier) == list(range(12))


def test_a_server_that_dribbles_has_one_deadline(server: RedisServer) -> None:
    """Each byte comes well within a socket's timeout; all of them would take an hour."""
    with redis_server() as own:
        slow = SlowRedis(own)
        with opened(slow.url) as tier:
            fill(tier)
            slow.piece, slow.pause = 1, 0.03
            begin = time.monotonic()
            assert there(tier) == []
            assert time.monotonic() - begin < 60
            assert not tier.is_open
            slow.piece, slow.pause = 2**16, 0.0
            until(lambda: tier.is_open)
            assert there(tier) == list(range(12))
        slow.close()


# -- forgetting ---------------------------------------------------------------------------------------


def test_what_is_erased_is_gone_from_the_server(server: RedisServer) -> None:
    tail = label(20, b"words")
    with opened(server.url) as tier:
        fill(tier)
        tier.write(30, chunk(20), tail)
        tier.erase_many([4, 30, 39])
        assert there(tier) == [k for k in range(12) if k != 4]
        assert not tier.find([label(4)], [tail.parent])
        with server.client as client:
            assert not [name for name in client.keys("*") if label(4).identity.hex().encode() in name]
            assert not client.keys("*:t:*")
    with opened(server.url) as tier:
        assert len(tier.kept()) == 11
        tier.write(30, chunk(4), label(4))  # somebody says the same again
        assert comes_back(tier, 30, 4)
    with opened(server.url) as tier:
        assert len(tier.kept()) == 12


def test_what_could_not_be_read_is_not_forgotten(server: RedisServer) -> None:
    """It was evicted: who loads it lets go of it, and finds it again when another engine has written it anew."""
    with opened(server.url) as tier, opened(server.url) as other:
        fill(tier)
        with server.client as client:
            client.delete(*(name for name in server.chunks() if label(4).identity.hex().encode() in name))
        assert not comes_back(tier, 4)
        tier.erase(4)
        other.write(0, chunk(4), label(4))
        assert tier.find([label(4)], []) == [label(4)]
        tier.adopt([4], [label(4)])
        assert comes_back(tier, 4)
        tier.erase(4)
        assert not tier.find([label(4)], [])
        assert not comes_back(other, 0, 4)


@pytest.mark.parametrize("restarted", [False, True], ids=["same process", "next process"])
def test_forgotten_while_the_server_is_away(restarted: bool, server: RedisServer) -> None:
    """It comes back with a snapshot that has everything. A busy machine may take it for away again, and it brings
    nothing for a moment; what is forgotten it never brings.
    """
    left = [k for k in range(12) if k not in (4, 5)]

    def still_there(tier: RemoteTier) -> list[int]:
        found = there(tier)
        assert not {4, 5} & set(found)
        return found

    with redis_server() as own:
        with opened(own.url) as tier:
            fill(tier)
            own.snapshot()
            own.kill()
            assert tier.erase_many([4, 5]) == [None, None], "it need not wait"
            if not restarted:
                own.start()
                until(lambda: tier.is_open)
                assert len(own.chunks()) == 10, "before anything is read"
                until(lambda: still_there(tier) == left)
                return
        own.start()
        with opened(own.url) as tier:
            assert len(own.chunks()) == len(tier.kept()) == 10
            until(lambda: still_there(tier) == left)


def test_connections_from_before_a_restart_do_not_close_the_link_again(server: RedisServer) -> None:
    """Each thread has one; only the first that asks finds out that the server has gone."""
    with redis_server() as own, opened(own.url) as tier, ThreadPoolExecutor(1) as other:
        fill(tier)
        assert other.submit(there, tier).result(SECONDS) == list(range(12))
        own.snapshot()
        own.kill()
        assert there(tier) == []
        own.start()
        until(lambda: tier.is_open)
        failures = tier._link.num_failures
        assert other.submit(there, tier).result(SECONDS) == list(range(12))
        assert tier._link.num_failures == failures


def test_an_old_snapshot_brings_nothing_back(server: RedisServer) -> None:
    """It was erased, and said so; then the server falls back behind that."""
    with redis_server() as own, opened(own.url) as tier:
        fill(tier)
        own.snapshot()
        tier.erase(4)
        own.kill()
        assert not comes_back(tier, 0)
        own.start()
        until(lambda: tier.is_open)
        assert len(own.chunks()) == 11
        assert not comes_back(tier, 4)


def test_without_a_journal_the_server_must_have_erased_it(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(remote_module, "state_home", lambda: tmp_path / "file")
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"), opened(server.url):
        pass
    monkeypatch.setattr(remote_module, "state_home", lambda: tmp_path / "journal")
    with redis_server() as own, opened(own.url) as tier:
        fill(tier)
        (tmp_path / "journal").touch()  # a file where its directory should be
        tier.erase(3)
        assert len(own.chunks()) == 11
        own.kill()
        with pytest.raises(OSError, match="journal"):
            tier.erase(4)
        own.start()
        until(lambda: tier.is_open)
        fill(tier)
        tier.erase(4)
        assert len(own.chunks()) == 11


def test_a_write_without_an_answer_leaves_nothing(server: RedisServer) -> None:
    """It arrives all the same, and nobody would know of it."""
    with redis_server() as own, opened(own.url) as tier:
        fill(tier)
        own.signal(signal.SIGSTOP)
        with pytest.raises(OSError, match="away"):
            tier.write(30, chunk(30), label(30))
        own.signal(signal.SIGCONT)
        until(lambda: tier.is_open)
        assert len(own.chunks()) == 12
        assert not tier.find([label(30)], [])


# -- options ------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_said(server: RedisServer) -> None:
    with pytest.raises(CapacityError, match="kv_remote_size"), opened(server.url, size=NBYTES):
        pass
    with pytest.raises(ConfigError, match="cannot be used"), opened("http://localhost:1/"):
        pass
    with (
        redis_server("--requirepass", "pass") as own_closed,
        pytest.raises(ConfigError, match="user and password"),
        opened(own_closed.url),
    ):
        pass


def test_passwords_are_not_shown() -> None:
    assert named("rediss://me:secret@host:6379/3") == "rediss://host:6379/3"
    assert os.sep in named("unix:///run/redis.sock")
    assert sealed_module.MIN_KEY_CHARACTERS >= 32
