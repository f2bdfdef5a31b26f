"""What host memory below the device gives one user, and what it costs those who find nothing in it.

A conversation of `--context` tokens goes on with 512 or 1,024 new ones. Its KV is on the device, or has had to leave
for the host, or is computed again; the time is that to the first token. Then decodes, while all that the link carries
goes from the device to the host, and while nothing does. Then prompts that nothing is known of, with and without the
tier, while every chunk has to leave the device. What is compared takes turns in one process.

    python -m benchmarks.tiers --model mistral-7b --context 8192 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cellar.core.config import EngineConfig
from cellar.core.messages import CopyBatch, CopyResult, Tier
from cellar.core.sampling import SamplingParams
from cellar.engine.llm import LLM
from cellar.engine.opened import open_front
from cellar.runtime.steps.local import LocalRuntime
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.host import HostTier

GIB = 2**30
LINK = 50e9
"""Bytes per second from the host that the limits are computed with."""

COPIED_NBYTES = GIB // 4
"""Of the device's chunks, what goes out with one order while others decode."""


class Talk:
    """Random prompts for one model, other ones with every `seed`."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm = llm
        self._rng = np.random.default_rng(seed)

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
    talk = Talk(llm, seed=new)
    device, host, computed, rates = [], [], [], []
    for k in range(rounds + 1):  # the first one warms kernels up
        past = talk.tokens(context)
        first = talk.seconds([past + talk.tokens(new)])
        again = talk.seconds([past + talk.tokens(new)])
        fill(llm, talk)
        before = loaded(llm)
        late = talk.seconds([past + talk.tokens(new)])
        nbytes, seconds, hits = (b - a for a, b in zip(before, loaded(llm), strict=True))
        if hits < 0.9 * context:
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
        "nbytes": nbytes,
        "bytes_per_second": statistics.median(rates),
    }


def fill(llm: LLM, talk: Talk) -> None:
    """Others' prompts, three times as many as the device holds: what was of use twice, and is worth twice as much, has
    left it, too.
    """
    capacity = llm.stats().total_chunks * llm.config.cache.block_size
    for _ in range(3 * capacity // llm.max_model_len + 2):
        talk.seconds([talk.tokens(llm.max_model_len - 2)])


def crowd(llm: LLM, prompts: int, length: int, answer: int, seed: int) -> float:
    """Tokens per second of prompts that nothing is known of."""
    talk = Talk(llm, seed)
    return prompts * answer / talk.seconds([talk.tokens(length) for _ in range(prompts)], answer)


class Outwards:
    """While it is entered, chunks go from the device to the host as fast as the link takes them."""

    def __init__(self, runtime: LocalRuntime) -> None:
        assert runtime.executor is not None
        arena = runtime.executor.arena
        device = arena.buffers[0].device
        self._chunks = ArenaChunks(arena, device)
        count = min(arena.num_slots, COPIED_NBYTES // self._chunks.chunk_nbytes)
        self._slots = np.arange(count, dtype=np.int32)
        self._host = HostTier(count, self._chunks.chunk_nbytes, device)
        self._copier = Copier(self._chunks, {Tier.HOST: self._host}, self._again)
        self._changed = threading.Condition()
        self._busy = False
        self._left = 0
        self._number = 0
        self.nbytes = 0
        self.seconds = 0.0

    def __enter__(self) -> Outwards:
        with self._changed:
            self._busy = True
            for _ in range(2):  # so that one waits while the other is copied
                self._submit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._busy = False
            while self._left:
                self._changed.wait()

    def close(self) -> None:
        """End the copies."""
        self._copier.close()

    def _submit(self) -> None:
        self._number += 1
        self._left += 1
        self._copier.submit(CopyBatch(self._number, Tier.DEVICE, self._slots, Tier.HOST, self._slots))

    def _again(self, result: CopyResult) -> None:
        with self._changed:
            self.nbytes += result.nbytes
            self.seconds += result.seconds
            self._left -= 1
            if self._busy:
                self._submit()
            self._changed.notify()


def copying(llm: LLM, runtime: LocalRuntime, rows: int, answer: int, rounds: int) -> dict[str, float]:
    """What decodes take while the device's chunks are copied out, and while nothing is."""
    talk, outwards = Talk(llm, seed=1), Outwards(runtime)
    quiet, busy = [], []
    for k in range(rounds + 1):  # the first one registers memory
        quiet.append(talk.seconds([talk.tokens(64) for _ in range(rows)], answer))
        with outwards:
            busy.append(talk.seconds([talk.tokens(64) for _ in range(rows)], answer))
        if not k:
            outwards.nbytes, outwards.seconds = 0, 0.0
    outwards.close()
    ratios = [b / a for a, b in zip(quiet[1:], busy[1:], strict=True)]
    return {
        "rows": rows,
        "quiet": statistics.median(quiet[1:]) / answer,
        "copying": statistics.median(busy[1:]) / answer,
        "ratio": statistics.median(ratios),
        "bytes_per_second": outwards.nbytes / outwards.seconds,
        "nbytes": outwards.nbytes,
    }


def opened(options: argparse.Namespace, **more: Any) -> tuple[LLM, LocalRuntime]:
    """The model with little memory for KV, and what runs it."""
    found = []

    def caught(runtime: Any) -> Any:
        found.append(runtime)
        return runtime

    config = EngineConfig.of(
        model=options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.context + max(options.new) + 256,
        kv_cache_memory_bytes=int(options.kv * GIB),
        **more,
    )
    llm = LLM.over(open_front(config, caught))
    (runtime,) = found
    return llm, runtime


def report(turn: dict[str, Any]) -> str:
    """One line of a turn."""
    bound = max(turn["device"], turn["link"])
    return (
        f"{turn['new']} new tokens after {turn['context']}: computed {1e3 * turn['computed']:.1f} ms, on the device "
        f"{1e3 * turn['device']:.1f}, from the host {1e3 * turn['host']:.1f} ({turn['host'] / bound:.2f} of the larger "
        f"of device and link, {1e3 * turn['link']:.1f}; {turn['host'] / turn['device']:.2f} of the device), "
        f"{turn['bytes_per_second'] / 1e9:.1f} GB/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv", type=float, default=4.0, help="GiB on the device")
    parser.add_argument("--host", type=float, default=24.0, help="GiB below it")
    parser.add_argument("--new", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="that decode while the device's chunks are copied out")
    parser.add_argument("--prompts", type=int, default=64, help="that nothing is known of")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    found: dict[str, Any] = {"turns": []}
    with_tier, _ = opened(options, kv_offloading_size=options.host)
    without, runtime = opened(options)
    with with_tier, without:
        found["ready"] = time.perf_counter() - begin
        out = found["copying"] = copying(without, runtime, options.rows, options.answer, options.rounds)
        print(
            f"{options.rows} decodes: {1e3 * out['quiet']:.3f} ms a step, {1e3 * out['copying']:.3f} while "
            f"{out['bytes_per_second'] / 1e9:.1f} GB/s go out ({out['ratio']:.3f})",
            flush=True,
        )
        hits, saved = loaded(with_tier)[2], with_tier.stats().tiers[-1].save_nbytes
        speeds: dict[str, list[float]] = {"with": [], "without": []}
        for k in range(options.rounds + 1):  # the first one fills the device
            for name, llm in (("with", with_tier), ("without", without)):
                speed = crowd(llm, options.prompts, min(1024, options.context), options.answer, seed=10_000 + k)
                speeds[name] += [speed] if k else []
        if loaded(with_tier)[2] != hits:
            raise RuntimeError("a prompt that nothing is known of was found in the tier")
        found |= {name: statistics.median(each) for name, each in speeds.items()}
        found["ratio"] = statistics.median([a / b for a, b in zip(*speeds.values(), strict=True)])
        found["saved"] = with_tier.stats().tiers[-1].save_nbytes - saved
        print(
            f"no hits: {found['with']:.0f} tok/s with the tier, {found['without']:.0f} without "
            f"({found['ratio']:.3f}), {found['saved'] / GIB:.1f} GiB copied out",
            flush=True,
        )
        for new in options.new:
            found["turns"].append(next_turn(with_tier, options.context, new, options.rounds))
            print(report(found["turns"][-1]), flush=True)
    found["seconds"] = time.perf_counter() - begin
    print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
