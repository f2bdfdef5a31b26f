"""The comparisons of attention: what they print, what they find wrong, and that the recount is what the kernel does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import attention_scattered as scattered
from benchmarks import attention_unified as unified
from benchmarks.attention import DEMO, Shape, by_turns, typical_seconds
from benchmarks.attention_recount import recount
from benchmarks.attention_unified import Size
from cellar.ops.attention import AttentionBuffers
from cellar.ops.attention.plan import FIRST, LAST, NARROW_TILE, PART, PARTIAL
from cellar.ops.attention.triton import attention_kernel
from tests.ops.attention_example import Example, example

# Of Triton's interpreter: powers that overflow are what the fallback is for.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")


def few_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers instead of enough to leave the processor's caches."""
    whole = bench.caches_of
    monkeypatch.setattr(scattered, "caches_of", lambda *args: whole(*args)[:2])
    monkeypatch.setattr(unified, "caches_of", lambda *args: whole(*args)[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 8, 70])
def test_a_shape_is_measured_and_right(queries: int, dtype: torch.dtype) -> None:
    shape = Shape("demo", 2, 70, queries, **DEMO)
    line = bench.measure(shape, CPU, dtype, bench.Rates(1e9, 1e12), 0.01)
    assert line.error <= bench.TOLERANCE[dtype]
    assert line.microseconds > 0
    assert line.limit_microseconds == pytest.approx(1e6 * shape.nbytes(dtype.itemsize) / 1e9)


# -- scattered ---------------------------------------------------------------------------------------------------------


def test_scattered_compares_all_ways_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few_caches(monkeypatch)
    monkeypatch.setattr(scattered, "CPU_CONTEXTS", (64, 96))
    report, png = tmp_path / "r.json", tmp_path / "r.png"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert bench.main(["--comparison", "scattered", "--json", str(report), "--png", str(png)]) == 0
    found = json.loads(report.read_text())
    shown = capsys.readouterr().out.splitlines()
    assert json.loads(shown[-1]) == found
    assert found["wrong"] == []
    assert [line["context"] for line in found["lines"]] == [64, 96]
    for line in found["lines"]:
        assert set(scattered.WAYS) <= set(line["seconds"])
        assert line["seconds"]["torch"] == line["seconds"][line["peer"]]
        assert line["ratio"] == pytest.approx(line["seconds"]["scattered"] / line["seconds"]["contiguous"])
        assert line["nbytes"] == 2 * 4 * line["context"] * 2 * 64 * 4
    assert png.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    scattered.main(["--draw", str(report), "--png", str(again)])
    assert again.stat().st_size > 10_000


@pytest.mark.parametrize("way", ["one by one", "copied out"])
def test_scattered_notices_a_wrong_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_caches(monkeypatch)
    if way == "one by one":
        plain = scattered.work_of
        monkeypatch.setattr(
            scattered, "work_of", lambda shape, start, device, n=None: plain(shape, start - (n == 1), device, n)
        )
    else:
        monkeypatch.setattr(torch, "index_select", lambda x, dim, index, out: out.copy_(x))
    line = scattered.measure(Shape("demo", 2, 64, 8, **DEMO), CPU, torch.float32)
    assert line.errors[way] > 0.01
    assert max(error for name, error in line.errors.items() if name != way) < 1e-5


def test_without_matplotlib_there_is_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    few_caches(monkeypatch)
    monkeypatch.setattr(scattered, "CPU_CONTEXTS", (64,))
    monkeypatch.setattr(scattered, "import_module", missing)
    assert scattered.run(CPU, torch.float32, tmp_path / "r.json", tmp_path / "r.png") == 0
    assert "no figure" in capsys.readouterr().err
    assert (tmp_path / "r.json").is_file()
    assert not (tmp_path / "r.png").exists()


def test_turns_are_taken_in_order() -> None:
    order: list[str] = []
    found = by_turns({name: lambda name=name: order.append(name) for name in "ab"}, CPU, rounds=3)
    assert "".join(order) == "ab" + "ababab"
    assert set(found) == {"a", "b"}
    assert typical_seconds(lambda: None, CPU, 0.001) >= 0


# -- unified -----------------------------------------------------------------------------------------------------------


def lifted(e: Example, by: dict[int, float]) -> Example:
    """Add `by[row]` to (about) all scores of some rows, as `shifted` does for all of them."""
    loud = 8.0
    e.q[:, :, 0] = loud
    e.k_cache[..., 0] = 0.0
    for row, amount in by.items():
        slots = [int(slot) for slot in e.table[row] if slot >= 0]
        e.k_cache[slots, ..., 0] = amount / (loud * e.scale)
    return e


def tiles_again(e: Example, device: str = "cpu", split: int = 32) -> tuple[int, int]:
    """How many tiles the kernel computed again, and how many there are.

    The maximum that a part leaves behind is exactly 0 if it did without one.
    """
    work = e.work(device, split=split)
    work.softmax = "unified"
    items = work.items
    buffers = AttentionBuffers(len(items.table), items.partial_rows, items.counters, work.shape, torch.device(device))
    buffers.extents.fill_(float("nan"))
    work.buffers = buffers
    work.__dict__.pop("resident", None)
    attention_kernel(*(t.to(device) for t in (e.q, e.k_cache, e.v_cache, e.table)), work, e.scale)
    tops = buffers.extents[..., 0].cpu()
    again = 0
    for n, item in enumerate(items.table.tolist()):
        tile = NARROW_TILE if n < items.narrow else items.wide_tile
        begin = item[PARTIAL] + item[PART] * tile
        mine = tops[begin : begin + item[LAST] - item[FIRST]]
        assert not mine.isnan().any(), "every tile of this test must be cut into parts"
        again += int((mine != 0).any(0).sum())
    return again, len(items.table) * work.shape.kv_heads


SPANS = [(0, 99, 100), (1, 63, 65), (2, 40, 42), (3, 70, 71)]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("by", [{}, {0: 100.0}, {1: -100.0, 3: 80.0}, {0: 60.0, 1: 70.0, 2: -66.0, 3: -72.0}])
def test_the_recount_is_what_the_kernel_does(by: dict[int, float], window: int | None) -> None:
    e = lifted(example(SPANS, heads=6, kv_heads=2, garbage=0.0, seed=5, window=window), by)
    (count,) = recount(e.q, e.k_cache, e.table, e.work(split=32), e.scale)
    assert (count.again, count.tiles) == tiles_again(e)
    assert count.outside <= count.rows
    assert (count.again == 0) == (not by)


def test_the_recount_counts_rows_that_see_something_and_shifts() -> None:
    e = example([(0, 3, 6), (1, 40, 41)], heads=4, kv_heads=2, garbage=0.0)
    work = e.work(split=32)
    plain, high = recount(e.q, e.k_cache, e.table, work, e.scale, (0.0, 100.0))
    # Row 0 has 3 tokens x 2 heads of a group in one tile; row 1 is cut into [0, 32) and [32, 41).
    assert (plain.tiles, plain.rows, plain.again, plain.outside) == (6, 2 * (6 + 2 + 2), 0, 0)
    assert (high.again, high.outside) == (high.tiles, high.rows)
    (apart,) = recount(e.q[3:], e.k_cache, e.table, example_of(e, 1).work(split=40), e.scale, newest_apart=True)
    assert apart.tiles == 2


def example_of(e: Example, span: int) -> Example:
    return Example(**{**vars(e), "spans": [e.spans[span]]})


def test_unified_on_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unified.run(CPU, tmp_path / "r.json", size=Size(rows=2, length=36, prompt=33)) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    by_shift = {(part["kind"], part["shift"]): part for part in found["shares"]}
    assert set(by_shift) == {(kind, by) for kind in ("decode", "prompt") for by in unified.SHIFTS}
    for (kind, by), part in by_shift.items():
        assert part["tiles"] > 0
        assert part["again"] == (part["tiles"] if by else 0), (kind, by)
        assert part["outside"] == (part["rows"] if by else 0), (kind, by)
    assert found["float32"]["decode"] | {"most_below": 0.0, "logits_differ": 0.0} == {
        "positions": 4,
        "flips": 0,
        "flips_fine": 0,
        "ours_from_exact": 0,
        "ordinary_from_exact": 0,
        "too_low": 0,
        "most_below": 0.0,
        "most_below_share": 0.0,
        "logits_differ": 0.0,
    }
    # Not the same arithmetic twice.
    assert 0 < found["float32"]["decode"]["logits_differ"] < 1e-3
    assert found["float32"]["prompt"]["positions"] == 66
    assert 0 < found["moved"]["100.0"] < 5e-4


def test_unified_notices_a_softmax_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = unified.decode_attention_kernel

    def wrong(*arguments: Any) -> torch.Tensor:
        out = plain(*arguments)
        return -out if arguments[7].softmax == "unified" else out

    monkeypatch.setattr(unified, "decode_attention_kernel", wrong)
    assert unified.run(CPU, None, size=Size(rows=2, length=36, prompt=33)) == 1


def test_the_table_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    few_caches(monkeypatch)
    part = {"positions": 10, "flips": 3, "flips_fine": 2, "ours_from_exact": 5, "ordinary_from_exact": 4}
    part |= {"too_low": 1, "most_below": 0.03, "most_below_share": 0.002, "logits_differ": 0.1}
    found: dict[str, Any] = {
        "machine": "m",
        "torch": "2",
        "model": "demo",
        "size": {"rows": 1, "length": 2},
        "shares": [{"kind": "decode", "shift": 0.0, "tiles": 8, "again": 2, "rows": 16, "outside": 4}],
        "moved": {"dtype": "bfloat16", "0.0": 0.0, "-100.0": 1e-3, "100.0": 0.5},
        "float32": {"decode": part | {"flips": 0}},
        "bfloat16": {"prompt": part},
        "times": unified.times(CPU, [Shape("tiny", 2, 40, heads=4, kv_heads=2, dim=64)], torch.float32),
        "times_float16": [],
    }
    found["wrong"] = unified.wrongs(found)
    assert found["wrong"] == ["a shift of 100.0 moves results by 5.0e-01"]
    text = "\n".join(unified.lines_of(found))
    assert "25.0000%" in text
    assert "bfloat16, prompt: 3 of 10 tokens differ" in text
    assert "1 of them more than 0.02 below" in text
    assert "0.20% of it" in text
    assert "tiny " in text


# -- on a device -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@GPU
def test_scattered_on_the_device() -> None:
    device = torch.device("cuda")
    with torch.inference_mode():
        line = scattered.measure(Shape("8 queries", 8, 512, 8), device, torch.bfloat16)
    assert set(scattered.WAYS) <= set(line.seconds), line.peer
    assert all(error < 2e-2 for error in line.errors.values()), line.errors
    assert all(0 < s < 1e-2 for s in line.seconds.values())


@pytest.mark.gpu
@GPU
def test_unified_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unified, "TIMED", (Shape("decode", 4, 512), Shape("prompt", 1, 256, 256)))
    assert unified.run(torch.device("cuda"), tmp_path / "r.json", size=Size(rows=4, length=160, prompt=96)) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["float32"]["decode"]["flips"] == 0
    assert found["bfloat16"]["decode"]["positions"] == 4 * 63
    assert [line["name"] for line in found["times"]] == ["decode", "prompt"]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_recount_is_what_the_device_does(dtype: torch.dtype) -> None:
    """In bfloat16 prompts do without a maximum, too; in float32 decodes alone do, which are single tokens here."""
    spans, by = [(row, stop - 1, stop) for row, _, stop in SPANS], {0: 80.0, 2: -90.0}
    if dtype == torch.bfloat16:
        spans += [(4, 100, 140), (5, 63, 65)]
        by[4] = 100.0
    e = lifted(example(spans, heads=6, kv_heads=2, garbage=0.0, seed=5, dtype=dtype), by)
    (count,) = recount(e.q, e.k_cache, e.table, e.work(split=32), e.scale)
    assert count.again > 0
    assert (count.again, count.tiles) == tiles_again(e, "cuda")
