"""Servers under conversations: what is planned, joined and printed; a small run with one and two replicas has both."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replicas.__main__ import drawn, main, ratios, table, trials
from benchmarks.replicas.load import Heard, Load, Row, begins, figures
from cellar.core.errors import ConfigError, RequestError

TALK = ((100, 20), (30, 50), (10, 90))
LOAD = Load([TALK, TALK[:1]], rate=8.0, think=2.0, warm=10, seconds=990, vocab_size=4000, seed="0", clients=4)


def options(**given: Any) -> Namespace:
    """As the command line has them."""
    found = {"model": None, "load_format": None, "replicas": (1,), "kv_offloading_size": None, "fronts": 2}
    return Namespace(**(found | {"compare_without_tiers": False} | given))


def test_servers_are_planned_one_after_the_other() -> None:
    planned = trials(options(model="llama-3-8b", replicas=(1, 4)), ["--max-model-len", "8192"])
    assert [(trial.label, trial.replicas) for trial in planned] == [("1 replica", 1), ("4 replicas", 4)]
    assert " ".join(planned[1].serve) == (
        "llama-3-8b --load-format dummy --skip-tokenizer-init --log-level warning --max-model-len 8192 "
        "--replicas 4 --api-server-count 8"
    )


def test_a_server_without_tiers_comes_first_and_differs_in_nothing_else() -> None:
    without, tiers = trials(options(kv_offloading_size="64", compare_without_tiers=True), [])
    assert tiers.serve == (*without.serve, "--kv-offloading-size", "64")
    assert (without.label, tiers.label) == ("1 replica without tiers", "1 replica with tiers")
    with pytest.raises(ConfigError, match="--kv-offloading-size"):
        trials(options(compare_without_tiers=True), [])


def test_conversations_are_cut_to_a_context() -> None:
    assert LOAD.within(200).lengths == [TALK[:2], TALK[:1]]
    with pytest.raises(ConfigError, match="119"):
        LOAD.within(119)


def test_a_process_has_its_share_of_a_steady_state() -> None:
    """2 turns a conversation: 1 conversation/s a process, of which Little's law has 1 x (2 - 1) x 2 s in thought."""
    shares = [begins(LOAD.share(k)) for k in range(4)]
    assert shares[0] == begins(LOAD.share(0)) != shares[1]
    for share in shares:
        thinking = [begin for begin in share if begin.turn]
        assert [begin.moment for begin in thinking] == [0.0, 0.0]
        assert all(begin.turns == TALK for begin in thinking)  # the other one has no second turn
        coming = share[len(thinking) :]
        assert 900 < len(coming) < 1100
        assert 0 < coming[0].moment < coming[-1].moment < 1000


def test_lengths_are_drawn_from_a_seed() -> None:
    assert drawn(1) == drawn(1) != drawn(2)
    turns = [turn for talk in drawn(1) for turn in talk]
    assert 4.5 < len(turns) / 500 < 7
    assert all(4 <= asked <= 2048 and 2 <= answered <= 2048 for asked, answered in turns)


def heard() -> list[Heard]:
    """Two processes, of which one was slow: percentiles of all are not the mean of each one's."""
    fast = [Row(10.0, 10.1, 11.0, tokens=100, could=0, found=0) for _ in range(9)]
    early, late = Row(8.0, 8.1, 9.9, 10, 100, 0), Row(12.0, 12.5, 15.5, 10, 100, 0)
    slow = [early, Row(10.0, 11.0, 14.0, tokens=100, could=200, found=150), late]
    return [
        Heard(fast, [], {10: 450.0, 11: 450.0}, 0.1),
        Heard(slow, ["no token came"], {9: 7.0, 12: 60.0, 13: 40.0, 15: 7.0}, 0.3),
    ]


def test_requests_of_all_processes_are_joined_before_percentiles() -> None:
    found = figures(heard(), 10, 15)
    assert found["requests"] == 10
    assert found["requests_per_second"] == 2.0
    assert found["tokens_per_second"] == pytest.approx(200.0)
    assert found["ms_per_token_p50"] == pytest.approx(10.0)
    assert found["ms_per_token_p90"] == pytest.approx(13.0)  # between the ninth and the tenth of ten
    assert found["first_token_ms_p90"] == pytest.approx(190.0)
    assert found["found_share"] == 0.75
    assert (found["in_flight_at_end"], found["oldest_in_flight_seconds"]) == (1, 3.0)
    assert (found["errors"], found["first_errors"], found["client_busy_max"]) == (1, ["no token came"], 0.3)
    with pytest.raises(RequestError, match="no token came"):
        figures(heard(), 20, 25)


def test_the_table_and_what_differs() -> None:
    counted = {
        "router_choices_total{reason=load}": 110.0,
        "router_choices_total{reason=chunks}": 273.0,
        "prompt_tokens_by_source_total{engine=0,source=device}": 1000.0,
        "prompt_tokens_by_source_total{engine=1,source=device}": 234.0,
    }
    found = figures(heard(), 10, 15)
    one = {"server": "1 replica", "offered_per_second": 24.0, "counters": {}, **found}
    two = {"server": "2 replicas", "offered_per_second": 48.0, "counters": counted, **found, "requests_per_second": 3.8}
    assert table([one, two])[1:] == [
        "| 1 replica | 2.0 | 200 | 10.0 / 13.0 | 100 / 190 | 75 % |  |  |",
        "| 2 replicas | 3.8 | 200 | 10.0 / 13.0 | 100 / 190 | 75 % | device 1,234 | chunks 273, load 110 |",
    ]
    assert ratios([one, two]) == [
        "2 replicas against 1 replica: load x2.00, requests x1.90, tokens x1.00, "
        "ms a token p90 x1.00, first token p90 x1.00"
    ]


@pytest.mark.long
def test_a_small_run_compares_one_replica_and_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns of the demo model on the CPU; histories are found, and two replicas are chosen from."""
    lengths, kept = tmp_path / "lengths.json", tmp_path / "found.json"
    turns = [{"context_tokens": 40, "output_tokens": 8}, {"context_tokens": 60, "output_tokens": 8}]
    lengths.write_text(json.dumps([{"turns": turns}]))
    arguments = ["--replicas", "1,2", "--rate", "4", "--think", "0.5", "--warm", "1", "--seconds", "4", "--settle", "0"]
    arguments += ["--lengths", str(lengths), "--vocab-size", "4000", "--fronts", "1", "--clients", "2"]
    arguments += ["--json", str(kept), "--device", "cpu", "--kv-cache-memory-bytes", "400000000"]
    main(arguments)
    printed = capsys.readouterr().out.splitlines()
    one, two = json.loads(printed[-1])
    assert json.loads(kept.read_text()) == [one, two]
    assert printed[-2].startswith("2 replicas against 1 replica: load x2.00")
    for found in (one, two):
        assert found["errors"] == 0
        assert found["requests"] > 0
        assert found["tokens_per_second"] > 0
    assert one["found_share"] > 0.5
    assert "router_choices_total" in "".join(two["counters"])
