from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellar.core.errors import ConfigError
from cellar.core.hardware import Curve, Device, Link, Measure, Profile, Table


def profile() -> Profile:
    rate = Measure(4.65e12, "B/s", "measured")
    gpu = Device(
        "gpu0", "gpu", Measure(141e9, "B", "datasheet"), rate, {"bfloat16": Measure(775e12, "FLOP/s", "measured")}
    )
    cpu = Device("cpu", "cpu", Measure(64e9, "B", "measured"), rate, launch=Measure(1e-6, "s", "fitted"), cores=2)
    return Profile(
        machine="test",
        devices=(gpu, cpu),
        links=(Link("cpu", "gpu0", Measure(55e9, "B/s", "measured"), duplex=Measure(0.91, "1", "measured")),),
        model="m",
        curves={"attention": Curve((1.0, 2.0, 4.0), (1.0, 3.0, 5.0), "token", "s")},
        tables={"linear": Table(("m", "kernel"), ((1, "gemv"), (8, "flat")))},
        created="2026-11-21",
    )


def test_a_profile_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "a" / "p.json"
    profile().save(path)
    assert Profile.load(path) == profile()
    assert json.loads(path.read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not a profile"),
        ("[]", "not a profile"),
        ("{}", "not a profile"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "machine": "x"}', "damaged"),
    ],
)
def test_a_bad_profile_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Profile.from_json(text)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cellar profile"):
        Profile.load(tmp_path / "none.json")


def test_curves_are_linear_between_and_beyond() -> None:
    curve = profile().curves["attention"]
    assert [curve.at(x) for x in (1, 1.5, 2, 3, 4, 6)] == [1, 2, 3, 4, 5, 7]
    assert curve.at(0) == -1
    assert Curve((2.0,), (7.0,), "a", "b").at(100) == 7
    with pytest.raises(ConfigError, match="ascend"):
        Curve((2.0, 1.0), (1.0, 1.0), "a", "b")
    with pytest.raises(ConfigError, match="as many"):
        Curve((2.0,), (), "a", "b")


def test_a_table_has_even_rows() -> None:
    with pytest.raises(ConfigError, match="1 values for 2 columns"):
        Table(("a", "b"), ((1,),))


def test_merging_replaces_equal_names() -> None:
    faster = Device("gpu0", "gpu", Measure(1.0, "B", "measured"), Measure(2.0, "B/s", "measured"))
    merged = profile().merged(devices=[faster], curves={"x": Curve((1.0,), (1.0,), "a", "b")})
    assert merged.device("gpu") == faster
    assert merged.device("cpu") == profile().device("cpu")
    assert merged.device("disk") is None
    assert set(merged.curves) == {"attention", "x"}
