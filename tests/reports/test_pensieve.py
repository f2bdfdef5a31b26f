"""Pensieve's evaluation, simulated: small versions of its figures, and the claims as arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cellar.bench.workloads import Trace
from cellar.core.errors import ConfigError
from cellar.reports import pensieve_figures
from cellar.reports.pensieve import MODELS, Cell, Point, Window, conversations, offered_load, run
from cellar.reports.pensieve_figures import (
    Claim,
    Figure,
    Panel,
    claims_table,
    figures,
    gain,
    lower_latency,
    ordered_thinking,
    policies,
    throughput_at,
    write_figures,
)
from cellar.reports.trace_figures import replay_trace, trace_table

SHORT = Window(20.0, 40.0)
POINT = Point(1.0, 1.0, 0.02, 0.03, 0.9, 100.0, 0.01, 0.9, 0, 100, 0, 0, 1.0)


def points(*pairs: tuple[float, float], **more: float) -> tuple[Point, ...]:
    """Offered and served rate, and the p90."""
    return tuple(replace(POINT, offered=rate, throughput=rate, p90=p90, **more) for rate, p90 in pairs)  # type: ignore[arg-type]


def test_models_are_those_of_the_table() -> None:
    layers = {name: (m.spec.num_layers, m.spec.hidden_size, m.spec.num_heads, m.spec.num_kv_heads, m.devices)
              for name, m in MODELS.items()}  # fmt: skip
    assert layers == {
        "OPT-13B": (40, 5120, 40, 40, 1),
        "Llama 2-13B": (40, 5120, 40, 10, 1),
        "OPT-66B": (64, 9216, 72, 72, 4),
        "Llama 2-70B": (80, 8192, 64, 8, 4),
    }
    assert MODELS["OPT-13B"].slots(40e9) * 32 == pytest.approx(40e9 / (2 * 40 * 5120 * 2), rel=1e-3)
    assert MODELS["Llama 2-70B"].machine.num_devices == 4


def test_the_load_is_what_is_offered_from_the_first_minute_on() -> None:
    cell, window = Cell("OPT-13B", "tiers"), Window(300.0, 600.0)
    load = offered_load(cell, 4.0, window, 0)
    assert (np.diff(load.arrivals) >= 0).all()
    moments = np.concatenate(
        [
            at + np.cumsum([t.think_time for t in c.turns])
            for c, at in zip(load.conversations, load.arrivals, strict=True)
        ]
    )
    for begin in (60.0, 300.0, 600.0):  # as if answers took no time
        assert ((moments >= begin) & (moments < begin + 240)).sum() / 240 == pytest.approx(4.0, rel=0.25)
    long = conversations(200, 30.0, 5, 0)
    assert min(len(c.turns) for c in long) == 5
    assert np.mean([t.think_time for c in long for t in c.turns[1:]]) == pytest.approx(30.0, rel=0.2)


@pytest.mark.long
def test_a_small_version_of_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pensieve_figures, "EQUAL_P90", 0.026)  # reached soon, so that curves are short
    cells = tuple(Cell("OPT-13B", line) for line in ("apart", "device", "tiers"))
    figure = Figure(
        "3.12", "small", (Panel("OPT-13B", cells), Panel("hits", cells[1:], "offered", "hit_share")),
        (gain(cells[2], 25), lower_latency(cells[1], 20)),
    )  # fmt: skip
    said: list[str] = []
    claims = write_figures(tmp_path, said.append, SHORT, (figure,))
    assert len(claims) == 2
    document = json.loads((tmp_path / "figures.json").read_text())
    curves = {c["line"]: c["points"] for c in document["figures"]["3.12"]["curves"]}
    assert curves["tiers"][0]["p90"] < curves["device"][0]["p90"] < curves["apart"][0]["p90"]
    assert curves["tiers"][0]["hit_share"] > curves["device"][0]["hit_share"]
    assert curves["apart"][0]["hit_share"] == 0
    assert (tmp_path / "figure-3.12.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(said[-1])[claims[0].what]["percent"] == claims[0].values["percent"]


@pytest.mark.long
def test_other_lines_run_too() -> None:
    """Policies and phases apart, on four devices as on one, and costs that only the policy believes."""
    for cell in (Cell("Llama 2-70B", "tiers apart", 30.0, 5), Cell("OPT-13B", "lru"), Cell("OPT-13B", "chance")):
        point = run(cell, 1.0, Window(5.0, 15.0))
        assert point.num_requests > 3
    assert run(Cell("OPT-13B", "tiers"), 1.0, Window(5.0, 15.0), costs={1: 1.0}).num_requests > 3
    with pytest.raises(ConfigError, match="no request ends in the measured window"):
        run(Cell("OPT-13B", "tiers"), 1.0, Window(0.0, 0.01))


def test_every_figure_has_its_number_and_a_claim() -> None:
    assert [figure.number for figure in figures()] == ["3.12", "3.13", "3.14", "3.15", "3.16", "3.18"]
    assert all(figure.claims for figure in figures())


# -- claims --------------------------------------------------------------------------------------------


def test_throughput_at_equal_latency() -> None:
    found = points((1.0, 0.02), (2.0, 0.05), (4.0, 0.2))
    assert throughput_at(found, 0.1) == pytest.approx(3.0)
    assert throughput_at(found, 0.01) == 1.0
    assert throughput_at(found, 0.5) == 4.0
    assert throughput_at(points((2.0, 0.05), (1.5, 0.4)), 0.1) == 2.0, "served less beyond the peak"


def test_claims_are_met_or_not() -> None:
    apart, tiers, device = (Cell("OPT-13B", line) for line in ("apart", "tiers", "device"))
    curves = {
        apart: points((1.0, 0.05), (2.0, 0.1), (3.0, 0.5)),
        device: points((1.0, 0.03), (2.0, 0.09), (3.0, 0.1)),
        tiers: points((1.0, 0.02), (3.0, 0.1), (4.0, 0.3)),
    }
    made = [gain(tiers, 50)(curves), gain(tiers, 51)(curves), lower_latency(device, 40)(curves)]
    assert [claim.holds for claim in made] == [True, False, True]
    assert made[0].values["percent"] == pytest.approx(50.0)
    assert made[2].values["percent"] == pytest.approx(40.0), "beyond the peak does not count"
    table = claims_table(made)
    assert "+50 % (3.00 over 2.00 requests/s) | yes" in table[2]
    assert table[3].endswith("| no |")
    short, long = replace(tiers, think=30.0), replace(tiers, think=120.0)
    assert not ordered_thinking((short, tiers))({short: points((1.0, 0.3)), tiers: points((2.0, 0.3))}).holds
    assert ordered_thinking((tiers, long))({tiers: points((2.0, 0.3)), long: points((1.0, 0.3))}).holds


def test_policies_are_compared_at_equal_rates() -> None:
    value, lru = Cell("OPT-13B", "tiers"), Cell("OPT-13B", "lru")
    seconds, tokens, hits = policies(value, lru)
    better = points((1.0, 0.1), (2.0, 0.1), recomputed_tokens=80.0, recomputed_seconds=0.01, hit_share=0.95)
    worse = points((2.0, 0.1), (3.0, 0.1), recomputed_tokens=100.0, recomputed_seconds=0.02, hit_share=0.9)
    found = [claim({value: better, lru: worse}) for claim in (seconds, tokens, hits)]
    assert [claim.holds for claim in found] == [True, True, True]
    assert found[1].values["percent"] == pytest.approx(20.0)
    assert found[2].values["points"] == pytest.approx(5.0)
    assert not seconds({value: worse, lru: better}).holds


def test_policies_are_compared_over_several_loads() -> None:
    """One load says little: what is lost differs more between loads than between policies."""
    value, lru = Cell("OPT-13B", "tiers"), Cell("OPT-13B", "lru")

    def found(*pairs: tuple[float, float]) -> Claim:
        curves = {}
        for seed, (mine, others) in enumerate(pairs):
            curves[replace(value, seed=seed)] = points((1.0, 0.1), recomputed_seconds=mine)
            curves[replace(lru, seed=seed)] = points((1.0, 0.1), recomputed_seconds=others)
        return policies(value, lru, len(pairs))[0](curves)

    assert found((0.016, 0.014), (0.006, 0.010), (0.003, 0.004)).holds
    assert found((0.016, 0.014), (0.006, 0.006), (0.003, 0.0035)).holds, "more, but not more than by chance"
    assert not found((0.016, 0.014), (0.008, 0.006), (0.0055, 0.0035)).holds
    assert "means of 3 loads" in found((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)).what


# -- traces --------------------------------------------------------------------------------------------


def test_a_trace_of_sessions_is_found_by_capacity() -> None:
    ids, stamps, number = [], [], 0
    for talk in range(30):
        said: list[int] = []
        for turn in range(4):
            said = [*said, number, number + 1]
            number += 2
            ids.append(tuple(said))
            stamps.append(10.0 * talk + 25.0 * turn)
    order = np.argsort(stamps, kind="stable")
    lengths = np.array([512 * len(ids[k]) for k in order], np.int32)
    lengths[0] = 100  # fills no block
    trace = Trace(np.array(stamps)[order], lengths, np.ones(len(ids), np.int32), tuple(ids[k] for k in order))
    rows = replay_trace(trace, (8, 16, 400))
    found = {(row.policy, row.capacity): row.found.hit_share for row in rows}
    assert found["lru", 400] == found["value", 400] == found["optimum", 400] == found["chance", 400]
    for name in ("lru", "value", "chance"):
        assert found[name, 8] <= found[name, 16] <= found[name, 400]
        assert found[name, 8] <= found["optimum", 8]
    assert len(trace_table(rows)) == 5
    assert rows[0].found.blocks == sum(map(len, ids)) - 2
    with pytest.raises(ConfigError, match="less than the longest prompt has, 8"):
        replay_trace(trace, (7,))
    with pytest.raises(ConfigError, match="names no blocks"):
        replay_trace(replace(trace, hash_ids=None))
