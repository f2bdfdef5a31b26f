"""Seconds from nothing to ready, by phase: with empty kernel caches, then again with what the first start left there.

    python -m benchmarks.start --model llama-3-8b --json start.json

Each start is a process of its own, with random weights, and a home and a Triton cache of its own: nothing that this
machine has compiled before helps. Phases: import; load (weights, while kernels are listed
and compiled); compile (what was left of it); rehearse (the largest steps); capture; rest. Behind ready the runtime
captures the sizes that are left in its idle moments: `behind`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PHASES = ("import", "load", "compile", "rehearse", "capture", "memory", "rest")
TARGETS = {"cold": 12.0, "warm": 4.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; 0 if both starts succeeded."""
    parser = argparse.ArgumentParser(description="Seconds from nothing to ready, with cold and warm kernel caches.")
    parser.add_argument("--model", default="llama-3-8b", help="name of a shipped config")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(start(options.model, options.device, options.max_model_len)))
        return 0
    given = ["--model", options.model, "--device", options.device]
    given += [] if options.max_model_len is None else ["--max-model-len", str(options.max_model_len)]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: apart(given, Path(folder)) for name in TARGETS}
    for line in lines_of(found):
        print(line)
    report = {"benchmark": "start", "model": options.model, **found, "targets": TARGETS}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


def apart(arguments: Sequence[str], home: Path) -> dict[str, float]:
    """One start in a process of its own, whose caches lie in `home`."""
    environment = {**os.environ, "HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
    command = [sys.executable, "-m", "benchmarks.start", "--child", *arguments]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    # What the child tells ends when it was ready; leaving is not part of a start.
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process": time.perf_counter() - begin}


def start(model: str, device: str, max_model_len: int | None) -> dict[str, float]:
    """Open the model in this process: -> seconds by phase, their sum under `ready`, and kernels compiled."""
    begin = time.perf_counter()
    from cellar.core.collector import collector_rests
    from cellar.core.config import DeviceConfig, EngineConfig, ModelConfig
    from cellar.core.driver import retain_context

    # As the commands do it.
    retain_context(DeviceConfig(device=device))
    with collector_rests():
        from cellar.runtime.steps.local import open_local

    imported = time.perf_counter() - begin
    chosen = ModelConfig(model=model, load_format="dummy", max_model_len=max_model_len)
    opened = open_local(EngineConfig(model=chosen, device=DeviceConfig(device=device)))
    ready = time.perf_counter() - begin
    found = {"import": imported, **opened.start_seconds}
    found["rest"] = ready - sum(found.values())
    executor = opened.runtime.executor
    assert executor is not None
    while executor.missing().missing:
        time.sleep(0.005)
    behind = time.perf_counter() - begin - ready
    opened.runtime.close()
    return {**found, "ready": ready, "behind": behind}


def lines_of(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table for people."""
    lines = [f"{'seconds':8}" + "".join(f"{name:>9}" for name in (*PHASES, "ready", "behind", "target"))]
    for name, seconds in found.items():
        row = "".join(f"{seconds.get(phase, 0.0):9.2f}" for phase in (*PHASES, "ready", "behind"))
        lines.append(f"{name:8}{row}{TARGETS[name]:9.0f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
