"""What host memory below the device gives one user, and what it costs those who find nothing in it.

A conversation of `--context` tokens goes on with 512 or 1,024 new ones. Its KV is on the device, or has had to leave
for the host, or is computed again; the time is that to the first token. Then prompts that nothing is known of, with and
without the tier, while every chunk has to leave the device.

    python -m benchmarks.tiers --model mistral-7b --context 8192 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM

GIB = 2**30
LINK = 50e9
"""Bytes per second from the host that the limits are computed with."""


class Talk:
    """Random prompts for one model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._rng = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        """So many that no other prompt begins with."""
        return self._rng.integers(0, self._llm.spec.vocab_size, count).tolist()  # type: ignore[no-any-return]

    def seconds(self, prompts: Sequence[list[int]], num_tokens: int = 1) -> float:
        """Until all of `prompts` have got so many tokens."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin


def loaded(llm: LLM) -> tuple[int, float, int]:
    """Bytes and seconds of all loads so far, and tokens found below the device."""
    tier = llm.stats().tiers[-1]
    return tier.load_nbytes, tier.load_seconds, tier.hit_tokens


def next_turn(llm: LLM, context: int, new: int, rounds: int) -> dict[str, Any]:
    """Median seconds to the first token of the next turn, by where the KV of the turns before it is."""
    talk = Talk(llm)
    device, host, computed, rates = [], [], [], []
    for k in range(rounds + 1):  # the first one warms kernels up
        past = talk.tokens(context)
        first = talk.seconds([past + talk.tokens(new)])
        again = talk.seconds([past + talk.tokens(new)])
        fill(llm, talk)
        before = loaded(llm)
        late = talk.seconds([past + talk.tokens(new)])
        nbytes, seconds, hits = (b - a for a, b in zip(before, loaded(llm), strict=True))
        if hits < context - llm.config.cache.block_size:
            raise RuntimeError(f"only {hits} of {context} tokens were found in the tier")
        if k:
            computed.append(first)
            device.append(again)
            host.append(late)
            rates.append(nbytes / seconds)
    return {
        "context": context,
        "new": new,
        "computed": statistics.median(computed),
        "device": statistics.median(device),
        "host": statistics.median(host),
        "link": nbytes / LINK,
        "bytes_per_second": statistics.median(rates),
    }


def fill(llm: LLM, talk: Talk) -> None:
    """Others' prompts, as many as the device holds and one more: everything from before has left it."""
    capacity = llm.stats().total_chunks * llm.config.cache.block_size
    for _ in range(capacity // llm.max_model_len + 2):
        talk.seconds([talk.tokens(llm.max_model_len - 2)])


def crowd(llm: LLM, prompts: int, length: int, answer: int) -> float:
    """Tokens per second of prompts that nothing is known of."""
    talk = Talk(llm)
    talk.seconds([talk.tokens(length) for _ in range(prompts)], answer)
    return prompts * answer / talk.seconds([talk.tokens(length) for _ in range(prompts)], answer)


def opened(options: argparse.Namespace, **more: Any) -> LLM:
    """The model with little memory for KV."""
    return LLM(
        options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.context + max(options.new) + 256,
        kv_cache_memory_bytes=int(options.kv * GIB),
        **more,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv", type=float, default=4.0, help="GiB on the device")
    parser.add_argument("--host", type=float, default=16.0, help="GiB below it")
    parser.add_argument("--new", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer to a prompt without hits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"turns": []}
    with opened(options, kv_offloading_size=options.host) as llm:
        for new in options.new:
            turn = next_turn(llm, options.context, new, options.rounds)
            found["turns"].append(turn)
            bound = max(turn["device"], turn["link"])
            print(
                f"{new} new tokens after {options.context}: computed {1e3 * turn['computed']:.1f} ms, on the device "
                f"{1e3 * turn['device']:.1f}, from the host {1e3 * turn['host']:.1f} ({turn['host'] / bound:.2f} of "
                f"the larger of device and link, {1e3 * turn['link']:.1f}), {turn['bytes_per_second'] / 1e9:.1f} GB/s",
                flush=True,
            )
        found["with"] = crowd(llm, options.prompts, min(1024, options.context), options.answer)
        found["saved"] = llm.stats().tiers[-1].save_nbytes
    with opened(options) as llm:
        found["without"] = crowd(llm, options.prompts, min(1024, options.context), options.answer)
    ratio = found["with"] / found["without"]
    print(f"no hits: {found['with']:.0f} tok/s with the tier, {found['without']:.0f} without ({ratio:.3f})")
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
