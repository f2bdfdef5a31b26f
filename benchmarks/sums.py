"""Sums of ranks on GPUs, by size and way: what chooses between the kernels of `ops/peers.py`, and the library.

    python -m benchmarks.sums --ranks 4 --json sums.json

Microseconds of one sum among twenty in a CUDA graph, the slowest rank's; each way is first compared with the parts
added in the order of ranks. `library` is what NCCL's own all-reduce takes, whose order is another; `then norm` and
`with norm` are rows of 8,192 numbers with residual and RMSNorm behind, in two launches and in one. `copied` is the
sum of a micro-batch with both, whose parts the copy engines bring: twenty in a row, launched one by one, and nothing
beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellar.core.micro_batches import LANES, PART_NBYTES
from cellar.ops.norm import add_rms_norm
from cellar.ops.peers import PeerBoxes, sum_at_once, sum_by_pieces, sum_in_blanks, sum_norm_of_peers, sum_of_peers
from cellar.runtime.captured import captured
from cellar.runtime.ranks.comm import GroupComm, nccl_group
from cellar.runtime.ranks.micro_batches import CopiedSums
from cellar.runtime.ranks.part_boxes import PartSizes, meet_with_parts
from cellar.runtime.ranks.peers import meet
from cellar.runtime.ranks.place import prepare_nccl

SIZES = "8192,16384,32768,65536,131072,262144,393216,524288,1048576,2097152,4194304,8388608,16777216,33554432,67108864"
CALLS = 20
EPS = 1e-5

WIDTH = 8192
"""Of rows with a norm."""

LEAST_COPIED = 2**20


def measure(rank: int, size: int, meeting: str, sizes: Sequence[int], output: str) -> None:
    """One rank's part; rank 0 prints and writes."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    prepare_nccl(size)
    store = FileStore(meeting, size)
    group = nccl_group(PrefixStore("group", store), rank, size)
    boxes = meet(PrefixStore("boxes", store), rank, size, device)
    plain = GroupComm(group, rank, size)
    parted = meet_with_parts(PrefixStore("parts", store), rank, PartSizes(LANES, size, PART_NBYTES, 2 * WIDTH), device)
    found: dict[str, dict[str, float]] = {}
    for nbytes in sizes:
        parts = [
            torch.randn(nbytes // 2, generator=torch.Generator().manual_seed(r)).bfloat16().to(device)
            for r in range(size)
        ]
        x = parts[rank]
        ways: dict[str, Callable[[], Tensor]] = {"gathered or exchanged": lambda x=x: plain.all_reduce(x)}  # type: ignore[misc]
        if boxes is not None and nbytes <= boxes.sizes.small:
            ways["at once"] = lambda x=x: sum_at_once(x, boxes)  # type: ignore[misc]
        if boxes is not None and nbytes <= boxes.sizes.blanks:
            ways["in blanks"] = lambda x=x: sum_in_blanks(x, boxes)  # type: ignore[misc]
        if boxes is not None and boxes.take(x):
            ways["by pieces"] = lambda x=x: sum_by_pieces(x, boxes)  # type: ignore[misc]
        if boxes is not None and nbytes % (2 * WIDTH) == 0 and boxes.take_norm(rows := x.view(-1, WIDTH)):
            residual = torch.randn(rows.shape, generator=torch.Generator().manual_seed(size)).bfloat16().to(device)
            weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
            ways["then norm"] = partial(_norm_behind, rows, residual, weight, boxes)
            ways["with norm"] = partial(_norm_inside, rows, residual, weight, boxes)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        other = x.clone()
        times = {}
        for name, way in ways.items():
            for _ in range(3):
                wanted = residual + total.bfloat16().view(-1, WIDTH) if "norm" in name else total.bfloat16()
                if not torch.equal(way(), wanted):
                    raise SystemExit(f"rank {rank}: {name} of {nbytes} bytes is wrong.")
            times[name] = _seconds(way, device, group)
        if parted is not None and LEAST_COPIED <= nbytes <= PART_NBYTES and nbytes % (2 * WIDTH) == 0:
            copied = CopiedSums(0, parted, device, lambda *_: None)
            times["copied"] = _eager_seconds(copied, x.view(-1, WIDTH), device, group)
        times["library"] = _seconds(lambda other=other: group.allreduce([other]).wait(), device, group)  # type: ignore[misc]
        slowest = torch.tensor(list(times.values()), device=device)
        all_of_them = [torch.empty_like(slowest) for _ in range(size)]
        group.allgather([all_of_them], [slowest]).wait()
        worst = torch.stack(all_of_them).amax(0).tolist()
        found[str(nbytes)] = dict(zip(times, (1e6 * seconds for seconds in worst), strict=True))
        if rank == 0:
            row = "  ".join(f"{name} {us:.1f}" for name, us in found[str(nbytes)].items())
            print(f"{nbytes / 1024:.0f} KiB: {row} us", flush=True)
    if rank == 0 and output:
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _norm_behind(x: Tensor, residual: Tensor, weight: Tensor, boxes: PeerBoxes) -> Tensor:
    return add_rms_norm(residual, sum_of_peers(x, boxes), weight, EPS)[1]


def _norm_inside(x: Tensor, residual: Tensor, weight: Tensor, boxes: PeerBoxes) -> Tensor:
    return sum_norm_of_peers(x, residual, weight, EPS, boxes)[1]


def _eager_seconds(sums: CopiedSums, rows: Tensor, device: torch.device, group: Any) -> float:
    weight = torch.ones(WIDTH, dtype=rows.dtype, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(4):
        group.barrier().wait()
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(CALLS):
            sums.add_rms_norm(rows, rows, weight, EPS)
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best / CALLS


def _seconds(way: Callable[[], object], device: torch.device, group: Any) -> float:
    def often() -> None:
        for _ in range(CALLS):
            way()

    run = captured(often, device)
    best = float("inf")
    for _ in range(8):
        group.barrier().wait()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best / CALLS


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Microseconds of a sum over GPUs by its size and way.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help="bytes, comma-separated, multiples of 16")
    parser.add_argument("--json", default="", help="file for the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        given = options.ranks, str(Path(folder) / "meeting"), [int(n) for n in options.sizes.split(",")], options.json
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, *given)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; what it said is above.")


if __name__ == "__main__":
    main()
