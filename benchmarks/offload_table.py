"""The rows of docs/performance/h200-offload.md, and their peers', one after another on one machine.

    python -m benchmarks.offload_table                                  # names of rows, and what each runs
    python -m benchmarks.offload_table opt-30b opt-30b-flexgen --seconds 200

Each row is a process of its own, ended after so many seconds. Prints a table: tokens a second, ms a token for rows of
one prompt, what the plan predicted, and the seconds of each channel, predicted / measured. Behind each row comes
what the process printed, as JSON by the row's name: whoever is ended in between loses no more than the row it was at.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OURS = "benchmarks.offload"
PEERS = "benchmarks.offload_peers"
GPU = "--load-format dummy --device cuda"
OPT = f"{GPU} --device-memory 16 --prompt 512 --generate 32 --once --warm"
INT4 = "--quantization int4 --kv-cache-dtype int4"
LLAMA = f"{GPU} --dtype bfloat16"
BIG = f"llama-3-70b {LLAMA} --device-memory 16 --quantization int4"

ROWS = {
    "opt-6.7b": (OURS, f"opt-6.7b {OPT} --batch 32 --max-num-batched-tokens 2048"),
    "opt-6.7b-kv": (
        OURS,
        f"opt-6.7b {OPT} --batch 32 --max-num-batched-tokens 8192 --kv-cache-memory-bytes 10951680000",
    ),
    "opt-6.7b-int4": (OURS, f"opt-6.7b {OPT} {INT4} --batch 128 --max-num-batched-tokens 8192"),
    "opt-30b": (OURS, f"opt-30b {OPT} --host-memory 105 --batch 85 --max-num-batched-tokens 8192"),
    "opt-30b-int4": (OURS, f"opt-30b {OPT} {INT4} --host-memory 90 --batch 200 --max-num-batched-tokens 8192"),
    "opt-175b-int4": (OURS, f"opt-175b {OPT} {INT4} --host-memory 112 --batch 32 --max-num-batched-tokens 4096"),
    "llama-3-8b": (OURS, f"llama-3-8b {LLAMA} --device-memory 6 --batch 1 --prompt 128 --generate 24"),
    "llama-3-70b": (OURS, f"{BIG} --batch 1 --prompt 128 --generate 16"),
    "llama-3-70b-128": (
        OURS,
        f"{BIG} --kv-cache-dtype int4 --batch 128 --prompt 512 --generate 128 --max-num-batched-tokens 4096 --once",
    ),
    "llama-3-70b-256": (
        OURS,
        f"{BIG} --kv-cache-dtype int4 --batch 256 --prompt 512 --generate 128 --max-num-batched-tokens 4096 --once",
    ),
    "opt-6.7b-flexgen": (PEERS, "flexgen opt-6.7b --device-memory 16 --batch 8"),
    "opt-6.7b-kv-flexgen": (PEERS, "flexgen opt-6.7b --device-memory 16 --batch 32 --percent 100 0 0 100 100 0"),
    "opt-30b-flexgen": (
        PEERS,
        "flexgen opt-30b --device-memory 16 --batch 8 --percent 20 80 0 100 0 100 --cpu-attention",
    ),
    "llama-3-8b-accelerate": (PEERS, "accelerate llama-3-8b --device-memory 6 --batch 1 --prompt 128 --generate 24"),
}
"""Module and arguments by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; 1 if a row said nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=", ".join(ROWS))
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a row is ended")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; rows are {', '.join(ROWS)}.")
    if not options.rows:
        print("\n".join(f"{name}: python -m {module} {rest}" for name, (module, rest) in ROWS.items()))
        return 0
    found = {}
    print(
        "| row | tok/s | ms a token | predicted tok/s | seconds, predicted / measured |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in options.rows:
        found[name] = said(ROWS[name], options.seconds)
        print(line(name, found[name]), json.dumps({name: found[name]}), sep="\n", flush=True)
    return 0 if all(found.values()) else 1


def said(row: tuple[str, str], seconds: float) -> dict[str, Any] | None:
    """What a row printed as JSON, even if it had to be ended afterwards; None if it printed nothing."""
    module, rest = row
    process = subprocess.Popen([sys.executable, "-m", module, *rest.split()], stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    lines = [text for text in out.splitlines() if text.startswith("{")]
    return None if not lines else json.loads(lines[-1])


def line(name: str, found: Mapping[str, Any] | None) -> str:
    """A row of the table."""
    if found is None:
        return f"| {name} | did not end | | | |"
    each, forecast = "", found.get("forecast")
    if found["batch"] == 1:
        seconds = found["decode_seconds_a_pass"] if "decode_seconds_a_pass" in found else found["ms_per_token"] / 1e3
        each = f"{1e3 * seconds:.1f}"
    rate, ways = f"{found['tokens_per_second']:.4g}", ""
    if forecast is None:
        return f"| {name} | {rate} | {each} | | |"
    parts = [(one["phase"], one) for one in forecast["phases"]]
    parts += [(one["channel"], one) for one in forecast["channels"]]
    ways = ", ".join(f"{what} {one['predicted']:.3g} / {one['measured']:.3g}" for what, one in parts)
    return f"| {name} | {rate} | {each} | {forecast['predicted_rate']:.4g} | {ways} |"


if __name__ == "__main__":
    sys.exit(main())
