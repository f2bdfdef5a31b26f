"""What host memory below the device gives one user, and what it costs those who find nothing in it.

A conversation of `--context` tokens goes on with 512 or 1,024 new ones. Its KV is on the device, or has had to leave
for the host, or is computed again; the time is that to the first token. Then decodes, while all that the link carries
goes from the device to the host, and while nothing does. Then prompts that nothing is known of, with and without the
tier, while every chunk has to leave the device. What is compared takes turns in one process.

    python -m benchmarks.tiers --model mistral-7b --context 8192 --json out.json
    python -m benchmarks.tiers --model mistral-7b --kv 6 --turns-only     what is compared on one engine
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cellar.core.config import EngineConfig
from cellar.core.messages import CopyBatch, CopyResult, MemoryQuestion, Tier
from cellar.core.sampling import SamplingParams
from cellar.engine.front import Front
from cellar.engine.llm import LLM
from cellar.engine.opened import open_front
from cellar.runtime.steps.local import LocalRuntime
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.host import HostTier
from cellar.server.engine_process import SWITCH_SECONDS

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

    def first(self, prompt: list[int]) -> float:
        """Until the first token of an answer of two: nothing ends then that its user would not wait for."""
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self._llm.stream({"prompt_token_ids": prompt}, params)
        next(outputs)
        seconds = time.perf_counter() - begin
        for _ in outputs:
            pass
        return seconds


def loaded(llm: LLM) -> tuple[int, float, int]:
    """Bytes and seconds of all loads so far, and tokens found below the device."""
    tier = llm.stats().tiers[-1]
    return tier.load_nbytes, tier.load_seconds, tier.hit_tokens


def say(line: str) -> None:
    """One line, at once: who reads it may have to stop the rest."""
    print(line, flush=True)


def next_turn(side: Side, context: int, new: int, rounds: int) -> dict[str, Any]:
    """Median seconds to the first token of the next turn, by where the KV of the turns before it is."""
    llm = side.llm
    talk = Talk(llm, seed=new)
    seen: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "bytes_per_second": []}
    fewest, most_nbytes = float(context), 0.0
    for k in range(rounds + 1):  # the first one warms kernels up
        past = talk.tokens(context)
        times = [talk.first(past + talk.tokens(new)) for _ in range(2)]
        fill(llm, talk)
        side.empty_device()
        before = loaded(llm)
        times.append(talk.first(past + talk.tokens(new)))
        nbytes, seconds, hits = (b - a for a, b in zip(before, loaded(llm), strict=True))
        times.append(nbytes / seconds if seconds else 0.0)
        say(
            f"{new} new tokens after {context}, {f'round {k} of {rounds}' if k else 'warming up'}: computed "
            f"{1e3 * times[0]:.1f} ms, on the device {1e3 * times[1]:.1f}, from the host {1e3 * times[2]:.1f}; "
            f"{hits:.0f} tokens found there, {nbytes / 2**20:.0f} MiB loaded at {times[3] / 1e9:.1f} GB/s"
        )
        if k:
            fewest, most_nbytes = min(fewest, hits), max(most_nbytes, nbytes)
            for each, value in zip(seen.values(), times, strict=True):
                each.append(value)
    return {
        "context": context,
        "new": new,
        **{name: statistics.median(each) for name, each in seen.items()},
        "link": most_nbytes / LINK,
        "nbytes": most_nbytes,
        "fewest_found": fewest,
        "rounds": seen,
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


def copying(side: Side, rows: int, answer: int, rounds: int) -> dict[str, float]:
    """What decodes take while the device's chunks are copied out, and while nothing is."""
    talk, outwards = Talk(side.llm, seed=1), Outwards(side.runtime)
    quiet, busy = [], []
    try:
        for k in range(rounds + 1):  # the first one registers memory
            quiet.append(talk.seconds([talk.tokens(64) for _ in range(rows)], answer))
            with outwards:
                busy.append(talk.seconds([talk.tokens(64) for _ in range(rows)], answer))
            if not k:
                outwards.nbytes, outwards.seconds = 0, 0.0
    finally:
        outwards.close()
    ratios = [b / a for a, b in zip(quiet[1:], busy[1:], strict=True)]
    return {
        "rows": rows,
        "quiet": statistics.median(quiet[1:]) / answer,
        "copying": statistics.median(busy[1:]) / answer,
        "ratio": statistics.median(ratios),
        "bytes_per_second": outwards.nbytes / max(outwards.seconds, 1e-9),
        "nbytes": outwards.nbytes,
    }


def nothing_known(tier: Side, without: Side, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of prompts that nothing is known of, with the tier and without, in turns."""
    hits, saved = loaded(tier.llm)[2], tier.llm.stats().tiers[-1].save_nbytes
    speeds: dict[str, list[float]] = {"with": [], "without": []}
    for k in range(options.rounds + 1):  # the first one fills the device
        for name, side in (("with", tier), ("without", without)):
            speed = crowd(side.llm, options.prompts, min(1024, options.context), options.answer, seed=10_000 + k)
            speeds[name] += [speed] if k else []
    return {
        **{name: statistics.median(each) for name, each in speeds.items()},
        "ratio": statistics.median([a / b for a, b in zip(*speeds.values(), strict=True)]),
        "saved": tier.llm.stats().tiers[-1].save_nbytes - saved,
        "hits": loaded(tier.llm)[2] - hits,
    }


@dataclass(frozen=True)
class Side:
    """The model with little memory for KV, and what runs it."""

    llm: LLM
    front: Front
    runtime: LocalRuntime

    def empty_device(self) -> None:
        """Whatever nobody uses leaves the device, if fill has left any of it there."""
        self.front.memory(MemoryQuestion((), flush=Tier.DEVICE), lambda answer: None)


def opened(options: argparse.Namespace, **more: Any) -> Side:
    """One side of what is compared."""
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
    front = open_front(config, caught)
    (runtime,) = found
    return Side(LLM.over(front), front.front, runtime)


def said_turn(turn: dict[str, Any]) -> str:
    """One line of a turn."""
    bound = max(turn["device"], turn["link"])
    short = (
        "" if turn["fewest_found"] >= 0.9 * turn["context"] else f"; ONLY {turn['fewest_found']:.0f} TOKENS WERE FOUND"
    )
    return (
        f"{turn['new']} new tokens after {turn['context']}: computed {1e3 * turn['computed']:.1f} ms, on the device "
        f"{1e3 * turn['device']:.1f}, from the host {1e3 * turn['host']:.1f} ({turn['host'] / bound:.2f} of the larger "
        f"of device and link, {1e3 * turn['link']:.1f}; {turn['host'] / turn['device']:.2f} of the device), "
        f"{turn['bytes_per_second'] / 1e9:.1f} GB/s{short}"
    )


def said_copying(out: dict[str, float]) -> str:
    """One line of decodes while chunks go out."""
    return (
        f"{out['rows']} decodes: {1e3 * out['quiet']:.3f} ms a step, {1e3 * out['copying']:.3f} while "
        f"{out['bytes_per_second'] / 1e9:.1f} GB/s go out ({out['ratio']:.3f})"
    )


def said_nothing_known(found: dict[str, float]) -> str:
    """One line of prompts that nothing is known of."""
    wrong = f"; {found['hits']:.0f} TOKENS WERE FOUND NONE THE LESS" if found["hits"] else ""
    return (
        f"no hits: {found['with']:.0f} tok/s with the tier, {found['without']:.0f} without ({found['ratio']:.3f}), "
        f"{found['saved'] / GIB:.1f} GiB copied out{wrong}"
    )


class Report:
    """What was found so far, in the file that was asked for."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begin = time.perf_counter()
        self.found: dict[str, Any] = {}

    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._begin

    def part(self, name: str, run: Callable[[], dict[str, Any]], said: Callable[[dict[str, Any]], str]) -> None:
        """Run a part and say what it has found, or why it has not."""
        try:
            self.found[name] = found = run()
            say(said(found))
        except Exception as error:
            traceback.print_exc()
            self.found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
            say(f"{name} FAILED: {error}")
        self.found["seconds"] = self.seconds()
        if self._path is not None:
            self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; -> how many parts have failed."""
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
    parser.add_argument("--turns-only", action="store_true", help="Neither copies outwards nor prompts without hits.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = Report(options.json)
    sys.setswitchinterval(SWITCH_SECONDS)  # as a server does
    tier = opened(options, kv_offloading_size=options.host)
    with ExitStack() as stack:
        stack.enter_context(tier.llm)
        report.found["ready"] = report.seconds()
        say(f"{options.model} ready after {report.seconds():.1f} s with {options.host:g} GiB below it")
        without = None
        if not options.turns_only:
            without = opened(options)
            stack.enter_context(without.llm)
            say(f"and without them after {report.seconds():.1f} s")
        for new in options.new:
            run = partial(next_turn, tier, options.context, new, options.rounds)
            report.part(f"turn of {new}", run, said_turn)
        if without is not None:
            run = partial(copying, without, options.rows, options.answer, options.rounds)
            report.part("copying", run, said_copying)
            report.part("nothing known", partial(nothing_known, tier, without, options), said_nothing_known)
    say(json.dumps(report.found))
    return len(report.found.get("failed", {}))


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
