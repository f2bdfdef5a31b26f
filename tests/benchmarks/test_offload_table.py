"""Rows of the table of models larger than the device, run one after another."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks import offload_peers, offload_table

HERE = (
    "--device cpu --device-memory 0.03 --dtype float32 --kv-cache-memory-bytes 6000000 --max-num-batched-tokens 64 "
    "--batch 1 --prompt 16 --generate 3"
)


def test_a_row_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model on a processor; one that ends with nothing is said, and does not stop the others."""
    rows = {"none": ("benchmarks.offload", "no-such-model --device-memory 1"), "demo": ("benchmarks.offload", HERE)}
    monkeypatch.setattr(offload_table, "ROWS", rows)
    assert offload_table.main(["none", "demo", "--seconds", "240"]) == 1
    _, _, none, said_none, row, said = capsys.readouterr().out.splitlines()
    assert none == "| none | did not end | | | |"
    assert json.loads(said_none) == {"none": None}
    found = json.loads(said)
    forecast, cells = found["demo"]["forecast"], [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:2] == ["demo", f"{found['demo']['tokens_per_second']:.4g}"]
    assert float(cells[2]) == pytest.approx(1e3 * found["demo"]["decode_seconds_a_pass"], abs=0.1)
    assert cells[3] == f"{forecast['predicted_rate']:.4g}"
    assert "decode " in cells[4]
    assert "device " in cells[4]


def test_a_row_that_has_printed_counts_though_it_does_not_end() -> None:
    """As FlexGen's process, whose threads go on."""
    assert offload_table.said(("tests.benchmarks.endless", ""), 5.0) == {"batch": 1}


@pytest.mark.parametrize("name", [name for name, (module, _) in offload_table.ROWS.items() if module.endswith("peers")])
def test_peers_know_their_options(name: str) -> None:
    options = offload_peers.parsed(shlex.split(offload_table.ROWS[name][1]))
    assert options.device_memory in (6, 16)


def test_a_row_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offload_table.main(["opt-1b"])
    assert "there is no row opt-1b; rows are opt-6.7b, " in capsys.readouterr().err
    assert offload_table.main([]) == 0
    assert "opt-30b-flexgen: python -m benchmarks.offload_peers flexgen opt-30b" in capsys.readouterr().out
