"""All cases of crowding over several sets of cores: `python -m tests.hostile.crowds 0,1 2,3 [--cases CASE ...]`.

Each set serves one attack at a time, server and clients together; while its memory is waited for, the next one begins
there. The table says, for each case, what eight tokens of another client took, and whether that is within its limit:
the quiet p99, one longest honest step and 0.1 s. Two honest steps are measured first, once on each set, all at the same
time: sixteen prompts of 128 tokens, and one prompt as long as the model takes, whose attention is fifteen times as much
work. Both are one step in a server that is idle. Whatever has not ended after `--limit` seconds is ended, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hostile.crowding import CASES, ROOT

BESIDE = 3
"""Cases at a time on a set of cores: one attacks for half a minute, two wait a minute for their memory."""

SLACK_SECONDS = 0.1
MOST_GROWTH, MOST_PEAK_MB = 1.1, 500.0

HONEST_STEPS = ((16, 128), (1, 2000))
"""Prompts, and the tokens of each."""

TAKEN = f"""
import random, time
from cellar import LLM, SamplingParams
params = SamplingParams(max_tokens=1, temperature=0.0)
with LLM(device="cpu") as llm:
    for count, length in {HONEST_STEPS}:
        found = []
        for _ in range(8):
            prompts = [{{"prompt_token_ids": random.choices(range(5, 4000), k=length)}} for _ in range(count)]
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found.append(time.perf_counter() - begun)
        print(sorted(found)[len(found) // 2])
"""


class Run:
    """Cases in the order in which they come, over sets of `cores`, until a moment of the clock."""

    def __init__(self, cores: Sequence[str], cases: Sequence[str], options: Sequence[str], end: float) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}  # and why
        self.step = 0.0
        self._cores = cores
        self._options = options
        self._end = end
        self._cases: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            self._cases.put(case)
            self.missing[case] = "not begun"

    def run(self) -> None:
        """All of them."""
        said = self._together([(cores, [sys.executable, "-c", TAKEN]) for cores in self._cores])
        taken = [statistics.median(map(float, steps)) for steps in zip(*(one.split() for one in said), strict=True)]
        self.step = max(taken)
        for (count, length), seconds in zip(HONEST_STEPS, taken, strict=True):
            print(f"an honest step of {count} x {length} tokens of prompts takes {seconds:.3f} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            threads = [
                threading.Thread(target=self._work, args=(cores, Path(folder) / f"turns-{k}"))
                for k, cores in enumerate(self._cores)
                for _ in range(BESIDE)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _together(self, commands: Sequence[tuple[str, list[str]]]) -> list[str]:
        said = [""] * len(commands)

        def run(k: int) -> None:
            said[k] = self._said(*commands[k])

        threads = [threading.Thread(target=run, args=(k,)) for k in range(len(commands))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    def _work(self, cores: str, turns: Path) -> None:
        while True:
            try:
                case = self._cases.get_nowait()
            except queue.Empty:
                return
            command = [sys.executable, "-m", "tests.hostile.crowding", f"--turns={turns}", *self._options, case]
            try:
                found = json.loads(self._said(cores, command))
            except (OSError, RuntimeError, ValueError) as error:
                self.missing[case] = str(error)
                print(f"{case}: {error}", flush=True)
                continue
            del self.missing[case]
            self.found[case] = {**found, "cores": cores}
            print(json.dumps(self.found[case]), flush=True)

    def _said(self, cores: str, command: list[str]) -> str:
        """What a command on these cores prints. Raises RuntimeError if it fails, or does not end in time."""
        process = subprocess.Popen(
            ["taskset", "-c", cores, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores.split(","))), "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            said, errors = process.communicate(timeout=max(0.1, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise RuntimeError("not ended in time") from None
        if process.returncode:
            raise RuntimeError(f"ended with status {process.returncode}: {errors[-2000:]}")
        return said


def table(run: Run) -> str:
    """A row of Markdown for each case."""
    lines = [
        "| case | p50, p99 | limit | longest wait | failures | peak, MB | back, most | kept? |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in run.found.items():
        limit = found["quiet_p99"] + run.step + SLACK_SECONDS
        back = max(found["back"].values())
        kept = {
            "p99": found["p99"] <= limit,
            "failures": not found["failures"],
            "peak": found["peak_MB"] < MOST_PEAK_MB,
            "back": back <= MOST_GROWTH,
        }
        broken = ", ".join(name for name, holds in kept.items() if not holds)
        lines.append(
            f"| `{case}` | {found['p50']:.2f}, {found['p99']:.2f} | {limit:.2f} | {found['gap']:.2f} "
            f"| {found['failures']} of {found['count'] + found['failures']} | {found['peak_MB']:.0f} | {back:.2f} "
            f"| {f'no: {broken}' if broken else 'yes'} |"
        )
    lines += [f"| `{case}` | {why.splitlines()[0]} | | | | | | no |" for case, why in run.missing.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cores", nargs="+", help="numbers of cores, with commas, of each set: 0,1 2,3")
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=7.0, help="how long each attack lasts")
    parser.add_argument("--after", type=float, default=60.0, help="seconds until memory is looked at again")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of all of it")
    options = parser.parse_args()
    given = [f"--seconds={options.seconds}", f"--after={options.after}", "--option=--device=cpu"]
    run = Run(options.cores, options.cases, given, time.monotonic() + options.limit)
    run.run()
    print(table(run))


if __name__ == "__main__":
    main()
