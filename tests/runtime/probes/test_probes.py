"""The profiler: tiny measurements, the file, the table, the shipped profile, the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from cellar.cli.profile import profile as verb
from cellar.core.errors import ConfigError
from cellar.core.hardware import Measure, Profile
from cellar.reports import profile as report
from cellar.runtime.probes import registry
from cellar.runtime.probes.context import ProbeContext


def tiny(directory: Path) -> ProbeContext:
    return ProbeContext(None, directory, nbytes=2**20, matmul_size=32, seconds=0.005)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return registry.measure(tiny(tmp_path_factory.mktemp("disk")))


def test_everything_is_measured_and_survives_the_file(found: Profile, tmp_path: Path) -> None:
    cpu, disk = found.device("cpu"), found.device("disk")
    assert cpu is not None
    assert disk is not None
    numbers = [cpu.capacity, cpu.bandwidth, cpu.launch, *cpu.flops.values(), disk.capacity, disk.bandwidth]
    numbers += [link.bandwidth for link in found.links]
    assert all(number is not None and number.value > 0 and number.source == "measured" for number in numbers)
    assert set(cpu.flops) == {"float32", "bfloat16"}
    assert [(link.source, link.target) for link in found.links] == [("cpu", "disk"), ("disk", "cpu")]
    assert {row[:2] for row in found.tables["memory"].rows} == {("cpu", p) for p in ("sum", "matvec", "copy")}
    assert cpu.capacity.value > 10**8
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found


def test_figures_are_plausible_for_any_machine(found: Profile) -> None:
    """Wrong by a factor of a thousand is a wrong unit."""
    cpu = found.device("cpu")
    assert cpu is not None
    assert cpu.launch is not None
    assert 1e7 < cpu.bandwidth.value < 1e13  # a busy machine lets threads wait for each other
    assert 1e7 < cpu.flops["float32"].value < 1e14
    assert 1e-7 < cpu.launch.value < 1e-2


def test_probes_leave_no_file_and_report_their_names(tmp_path: Path) -> None:
    names: list[str] = []
    registry.measure(tiny(tmp_path), names.append)
    assert names == ["memory", "matmul", "links", "launch", "cells"]
    assert list(tmp_path.iterdir()) == []


def test_the_machine_is_named_by_its_kind() -> None:
    name = registry.machine_name(None)
    assert name == name.lower().strip("-")
    assert " " not in name
    assert report.default_path(name).name == f"profile-{name}.json"


def test_the_shipped_profile() -> None:
    h200 = registry.shipped("h200")
    gpu = h200.device("gpu")
    assert gpu is not None
    assert gpu.bandwidth == Measure(4.65e12, "bytes/s", "measured")
    assert h200.curves["link.cpu.gpu"].at(2**18) == 32.5e9
    with pytest.raises(ConfigError, match="there is h200"):
        registry.shipped("abacus")


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (55.3e9, "bytes/s", "55.3 GB/s"),
        (17e-6, "s", "17 us"),
        (0.914, "1", "0.914"),
        (7.75e14, "FLOP/s", "775 TFLOP/s"),
    ],
)
def test_numbers_are_shown_with_a_prefix(value: float, unit: str, shown: str) -> None:
    assert report.human(Measure(value, unit, "measured")) == shown


def test_the_table_says_value_unit_and_where_from() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_profile(registry.shipped("h200"), console)
    text = console.export_text()
    for words in ("4.65 TB/s", "measured", "datasheet", "cpu -> gpu: bandwidth"):
        assert words in text


def test_the_command_writes_the_file_and_refuses_an_absent_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ProbeContext", lambda accelerator, directory: tiny(directory))
    app = Typer()
    app.command()(verb)
    file = tmp_path / "deep" / "p.json"
    done = CliRunner().invoke(app, ["--output", str(file), "--device", "cpu", "--num-threads", "1"])
    assert done.exit_code == 0, done.output
    assert "measuring matmul" in done.output
    assert Profile.load(file).device("cpu") is not None
    quiet = CliRunner().invoke(app, ["--output", str(file), "--device", "cpu", "--quiet"])
    assert quiet.output.strip() == str(file)
    refused = CliRunner().invoke(app, ["--output", str(tmp_path / "x"), "--device", "cuda:98"])
    assert refused.exit_code == 2
    assert "is not there" in refused.output
    assert not (tmp_path / "x").exists()
