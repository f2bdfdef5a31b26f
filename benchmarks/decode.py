"""Seconds per decode step by batch and context, as a user sees them: through `LLM.generate`, random weights.

A step is (t(130 tokens) - t(2 tokens)) / 128, each the better of two runs, so that prompts and start-up cancel out.

    python -m benchmarks.decode --model llama-3-8b --shapes 1x1024,32x1024 --json out.json
    python -m benchmarks.decode --model llama-3-8b --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cellar.bench.offline import SETTLE_SECONDS
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM

SHAPES = "1x1024,8x1024,32x1024,64x1024,128x1024,256x512,1x8000,16x8000"
SHORT, LONG = 2, 130


def seconds_per_step(
    llm: LLM, batch: int, context: int, short: int = SHORT, long: int = LONG, *, same: bool = False
) -> float:
    """Of `batch` sequences with `context` tokens of prompt each; greedy, end symbols ignored.

    `same`: all runs have the same prompts, of which a model with prefix caching computes the first only.
    """
    rng = np.random.default_rng((batch, context))
    kept = rng.integers(0, llm.spec.vocab_size, (batch, context)).tolist()

    def run(num_tokens: int) -> float:
        prompts = kept if same else rng.integers(0, llm.spec.vocab_size, (batch, context)).tolist()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    if same:
        run(short)
    best = {n: min(run(n) for _ in range(2)) for n in (short, long)}
    return (best[long] - best[short]) / (long - short)


def prompt_seconds(llm: LLM, length: int) -> float:
    """Of one prompt up to its first token, the best of four."""
    rng = np.random.default_rng(length)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def run() -> float:
        prompt = rng.integers(0, llm.spec.vocab_size, length).tolist()
        begin = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - begin

    return min(run() for _ in range(4))


def tokens_per_second(llm: LLM, count: int, prompt: int, generate: int) -> float:
    """Generated tokens a second of so many requests at once, the better of two runs."""
    rng = np.random.default_rng((count, prompt))
    params = SamplingParams(temperature=0, max_tokens=generate, ignore_eos=True, detokenize=False)

    def run() -> float:
        prompts = rng.integers(0, llm.spec.vocab_size, (count, prompt)).tolist()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    return count * generate / min(run() for _ in range(2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Milliseconds per decode step by batch and context.")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", choices=("int4", "int8", "fp8"), help="of the weights, on loading")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8 or int4")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--shapes", default=SHAPES, help="batch x context, comma-separated")
    parser.add_argument("--prompts", default="128,1024,4000,8000", help="prompt lengths, comma-separated")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks, each on a GPU of its own")
    parser.add_argument("--offline", default="", help="requests x prompt x tokens of whole runs, comma-separated")
    parser.add_argument("--machine-profile", default="auto", help="as of an engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--same-prompts", action="store_true", help="compute the prompts of a shape once: faster")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, float] = {}
    begin = time.perf_counter()
    with LLM(
        options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        quantization=options.quantization,
        device=options.device,
        max_model_len=options.max_model_len,
        enforce_eager=options.eager,
        tensor_parallel_size=options.tensor_parallel_size,
        enable_prefix_caching=options.same_prompts,
        machine_profile=options.machine_profile,
    ) as llm:
        found["seconds to ready"] = time.perf_counter() - begin
        print(f"ready after {found['seconds to ready']:.1f} s", flush=True)
        time.sleep(SETTLE_SECONDS)
        for shape in filter(None, options.shapes.split(",")):
            batch, context = map(int, shape.split("x"))
            found[shape] = 1e3 * seconds_per_step(llm, batch, context, same=options.same_prompts)
            print(f"decode {shape}: {found[shape]:.3f} ms", flush=True)
        for length in map(int, filter(None, options.prompts.split(","))):
            found[f"prompt {length}"] = 1e3 * prompt_seconds(llm, length)
            print(f"prompt {length}: {found[f'prompt {length}']:.1f} ms", flush=True)
        for load in filter(None, options.offline.split(",")):
            found[f"offline {load}"] = tokens_per_second(llm, *map(int, load.split("x")))
            print(f"offline {load}: {found[f'offline {load}']:.0f} tokens/s", flush=True)
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
