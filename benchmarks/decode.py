"""Seconds per decode step by batch and context, as a user sees them: through `LLM.generate`, random weights.

A step is (t(130 tokens) - t(2 tokens)) / 128, each the better of two runs, so that prompts and start-up cancel out.

    python -m benchmarks.decode --model llama-3-8b --shapes 1x1024,32x1024 --json out.json
    python -m benchmarks.decode --model llama-3-8b --tensor-parallel-size 2
    python -m benchmarks.decode --model llama-3-70b --tensor-parallel-size 2 --shares-of 4
    python -m benchmarks.decode --model llama-3-70b --tensor-parallel-size 2 --shapes "" --prompts 128 --line 128

With `--shares-of 4` two ranks compute what two of four would: heads, inner numbers and vocabulary are cut to half.
`--line 128` says of prompts of 128 tokens what begins and ends when, in all processes; marks cost some microseconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marks import Line, lines, marks, read
from cellar.bench.offline import SETTLE_SECONDS
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM
from cellar.models.registry import shipped_config

CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""What a rank of tensor parallelism has a share of, as a Llama's config names it."""

SHAPES = "1x1024,8x1024,32x1024,64x1024,128x1024,256x512,1x8000,16x8000"
SHORT, LONG = 2, 130
LINES = 20


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


def prompt_line(llm: LLM, length: int, path: Path) -> list[Line]:
    """What begins and ends when in prompts of so many tokens: milliseconds, medians of LINES of them."""
    for _ in range(-(-(LINES + 2) // 4)):
        prompt_seconds(llm, length)
    return lines(read(path), "LLM.generate", LINES)


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


def cut(config: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """A part of a model, as a config: layers as wide as they were, of so many parts of the heads, and so on."""
    missing = [name for name in CUT if name not in config and name != "num_key_value_heads"]
    if missing:
        raise SystemExit(f"the config has no {missing[0]}, so it is not known what to cut; take a model as Llama.")
    heads = config["num_attention_heads"]
    found = dict(config) | {"head_dim": config.get("head_dim") or config["hidden_size"] // heads}
    found |= {name: 0 for name in ("bos_token_id", "eos_token_id") if name in config}  # the vocabulary ends earlier
    for name in CUT:
        found[name], rest = divmod(config.get(name, heads), parts)
        if rest:
            raise SystemExit(f"{name} {config.get(name, heads)} cannot be cut into {parts} parts; take fewer ranks.")
    return found


def _opened(model: str, options: argparse.Namespace) -> LLM:
    return LLM(
        model,
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
    )


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
    parser.add_argument("--shares-of", type=int, help="ranks of which those that run have the shares")
    parser.add_argument("--offline", default="", help="requests x prompt x tokens of whole runs, comma-separated")
    parser.add_argument("--machine-profile", default="auto", help="as of an engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--line", type=int, help="where the time of prompts of so many tokens goes")
    parser.add_argument("--same-prompts", action="store_true", help="compute the prompts of a shape once: faster")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, float] = {}
    begin = time.perf_counter()
    with ExitStack() as stack:
        model = options.model
        if options.shares_of is not None:
            config = shipped_config(model)
            if config is None:
                raise SystemExit(f"{model} is no config that ships with the package; shares are made of these.")
            model = stack.enter_context(tempfile.TemporaryDirectory())
            parts, rest = divmod(options.shares_of, options.tensor_parallel_size)
            if rest:
                raise SystemExit(f"{options.tensor_parallel_size} ranks have no whole shares of {options.shares_of}.")
            (Path(model) / "config.json").write_text(json.dumps(cut(config, parts)), encoding="utf-8")
        marked = None if options.line is None else stack.enter_context(marks())
        llm = stack.enter_context(_opened(model, options))
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
        if marked is not None:
            for line in prompt_line(llm, options.line, marked):
                print(f"{line.begin:9.3f} {line.end:9.3f}  {line.process:2}  {line.name}", flush=True)
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
