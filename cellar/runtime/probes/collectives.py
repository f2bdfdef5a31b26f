"""Collectives among ranks, measured: a process for each, on a GPU or a part of the processor of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait

import torch

from cellar.core.collectives import COLUMNS, TABLE
from cellar.core.errors import ConfigError, DeviceError
from cellar.core.hardware import Profile
from cellar.core.hardware import Table as Figures
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.exchanges import Row, Setup, measure_exchanges
from cellar.runtime.ranks.comm import GONE

MOST_NBYTES = {"cpu": 2**22, "cuda": 2**26}
"""Of a tensor: what a step of some thousand tokens sends on a GPU; on a CPU ranks are for tests."""

PATIENCE = 60.0
"""Seconds in which ranks find each other, or miss one that has gone."""

LONGEST = 900.0
"""Seconds of all figures together, after which ranks are given up."""

GRACE = 1.0
"""Seconds in which others may say what kept them, once one has missed them."""


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds `tables["collectives"]`: seconds of each kind over 2 to `context.ranks` ranks, by size and way.

    Raises ConfigError for more ranks than GPUs, DeviceError if a rank fails.
    """
    size, kind = context.ranks or 1, "cpu" if context.accelerator is None else "cuda"
    if size < 2:
        raise ConfigError(f"ranks is {size}; collectives are among 2 or more.")
    if kind == "cuda" and (count := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"ranks is {size}, but this machine has {count} GPU{'s' * (count > 1)}; set it to at most {count}, or "
            "device to cpu."
        )
    meeting = tempfile.mkdtemp(prefix="cellar-ranks-")
    threads = max(1, torch.get_num_threads() // size)
    most, seconds = min(MOST_NBYTES[kind], context.nbytes // 4), context.seconds / (4 if kind == "cpu" else 20)
    try:
        rows = _measured(Setup(size, f"{meeting}/ranks", kind, most, seconds, threads, PATIENCE))
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return profile.merged(tables={TABLE: Figures(COLUMNS, tuple(rows))})


def _measured(setup: Setup) -> list[Row]:
    """Rank 0's rows, once all ranks are done. Raises DeviceError, with no process left, if one is not."""
    spawn = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(setup.size):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=_run_rank, args=(rank, setup, theirs), name=f"cellar-rank-{rank}", daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    said: dict[int, list[Row] | str] = {}
    end = time.monotonic() + LONGEST
    try:
        while len(said) < setup.size and (left := end - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in said}
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                try:
                    found = pipe.recv()
                except (EOFError, OSError):
                    found = "its process has ended"
                said[waiting[pipe]] = found
                if isinstance(found, str):
                    end = min(end, time.monotonic() + GRACE)
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()
    failed = {rank: words for rank, words in said.items() if isinstance(words, str)}
    cause = next((rank for rank, words in failed.items() if not words.startswith(GONE)), next(iter(failed), None))
    if cause is not None:
        raise DeviceError(f"collectives were not measured: rank {cause}: {failed[cause].rstrip('.')}; start again.")
    if len(said) < setup.size:
        raise DeviceError(f"collectives were not measured within {LONGEST:g} s; look for what else uses the devices.")
    rows = said[0]
    assert not isinstance(rows, str)
    return rows


def _run_rank(rank: int, setup: Setup, pipe: Connection) -> None:
    """In a rank's process, which ends when that which started it does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="cellar-lifeline", daemon=True).start()
    try:
        found: list[Row] | str = measure_exchanges(rank, setup)
    except Exception as error:
        found = " ".join(str(error).split())[:300] or type(error).__name__
    with contextlib.suppress(OSError):
        pipe.send(found)
    if isinstance(found, list):
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # until it is ended: others may still be reading what it sent them
    os._exit(0)


def _end_after(parent: int) -> None:
    wait([parent])
    os._exit(1)
