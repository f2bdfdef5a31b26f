"""Each campaign for a few seconds, from kept seeds; `python -m tests.hostile.campaign` runs all of them for longer."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.hostile.bodies import BODIES, FINE, send_spoilt
from tests.hostile.campaign import Figures, Whole, honest, is_clean, run
from tests.hostile.checkpoints import try_many
from tests.hostile.connections import crowd
from tests.hostile.engine_driver import drive
from tests.hostile.grown import grow
from tests.hostile.mutations import dumped, spoilt
from tests.limits import join_all, until
from tests.server.served import Served, serve

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {"upload_timeout": 1.0, "prepare_timeout": 1.0, "max_body_bytes": 2**20}
    kept = {"data_dir": str(tmp_path_factory.mktemp("data"))}
    with serve(kept, limits, num_rows=16, num_slots=256) as served:
        yield served


def test_the_same_seed_spoils_in_the_same_way() -> None:
    once, again = ([dumped(spoilt(random.Random(k), BODIES[k % len(BODIES)][1])) for k in range(100)] for _ in range(2))
    assert once == again
    assert len(set(once)) > 80


@pytest.mark.long
def test_mutated_bodies(served: Served) -> None:
    found = send_spoilt(served.url, SEEDS[0], lambda count: count < 150, {})
    assert not found.keys() - FINE, found
    assert found[200] >= 5
    assert found[400] > 50
    served.settle()


@pytest.mark.long
def test_slow_and_greedy_connections(served: Served) -> None:
    assert crowd(served.url, SEEDS[0], lambda count: count < 30, most=20) >= 30
    with served.http() as http:
        assert http.get("/health").status_code == 200
    served.settle()


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_those_of_a_run_alone(seed: int) -> None:
    tally = drive(seed, lambda count: count < 120)
    assert tally.wrong == 0
    assert tally.whole > 40
    assert tally.dropped > 10


@pytest.mark.long
def test_grown_grammars(served: Served) -> None:
    found = grow(served.url, SEEDS[0], lambda count: count < 25, {})
    assert not found.keys() - FINE, found
    served.settle()


@pytest.mark.long
def test_mutated_checkpoints() -> None:
    done, failures = try_many(SEEDS[0], 40)
    assert not failures
    assert done == 40


@pytest.mark.long
def test_all_at_once_with_kills() -> None:
    report = run(10.0, SEEDS[0], kill_every=3.0, offline=False)
    assert is_clean(report), json.dumps(report, indent=1)
    assert sum(report["killed"].values()) >= 1
    assert report["honest"]["answered"] > 5


def test_who_waits_for_a_killed_process_is_not_lost() -> None:
    """A request is given up while all processes are there; while one is missing it is sent again until that is back."""
    figures, whole = Figures(), Whole()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    whole.broken()
    thread = threading.Thread(target=honest, args=(url, 0, lambda count: count < 1, figures, whole, 0.3), daemon=True)
    thread.start()
    until(lambda: figures.again["ConnectError"] > 6)
    assert figures.lost == 0
    whole.mended(1.0)
    join_all([thread])
    assert figures.lost == 1
    assert whole.away == [1.0]
