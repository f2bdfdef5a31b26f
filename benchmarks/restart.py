"""What a disk below the device gives a user who comes back after a restart: the next turn's time to the first token.

A conversation of `--context` tokens is computed by one engine, which ends; the next one, on the same folder, is asked
to go on with `--new` tokens, and then something as long that nobody has asked before.

    python -m benchmarks.restart --model llama-3.2-1b --device cpu --context 512 --folder /var/tmp/kv --json out.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cellar import LLM, SamplingParams

GIB = 2**30


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a prompt has its first token."""
    begin = time.perf_counter()
    llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False
    )
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--kv", type=float, default=0.25, help="GiB on the device")
    parser.add_argument("--size", type=float, default=1.0, help="GiB on the disk")
    parser.add_argument("--folder", required=True, help="on the disk")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    engine = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.context + options.new + 64,
        "kv_cache_memory_bytes": int(options.kv * GIB),
        "kv_disk_path": options.folder,
        "kv_disk_size": options.size,
    }
    with LLM(options.model, **engine) as llm:
        rng = np.random.default_rng(0)
        talk, more, other = (
            rng.integers(0, llm.spec.vocab_size, n).tolist()
            for n in (options.context, options.new, options.context + options.new)
        )
        first_token(llm, other[:32])  # warms up
        first_token(llm, talk)
    begin = time.perf_counter()
    with LLM(options.model, **engine) as llm:
        ready = time.perf_counter() - begin
        warm = rng.integers(0, llm.spec.vocab_size, 32).tolist()
        first_token(llm, warm)
        loaded = first_token(llm, talk + more)
        disk = llm.stats().tiers[-1]
        computed = first_token(llm, other)
    found = {
        "context": options.context,
        "new": options.new,
        "ready": ready,
        "loaded": loaded,
        "computed": computed,
        "hit_tokens": disk.hit_tokens,
        "nbytes": disk.load_nbytes,
        "bytes_per_second": disk.load_nbytes / max(disk.load_seconds, 1e-9),
    }
    print(
        f"{options.new} tokens after {disk.hit_tokens} from the disk ({disk.load_nbytes / 2**20:.0f} MiB at "
        f"{found['bytes_per_second'] / 1e9:.2f} GB/s): {1e3 * loaded:.0f} ms; all computed: {1e3 * computed:.0f} ms"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
