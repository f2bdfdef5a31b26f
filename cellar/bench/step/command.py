"""A step taken apart: time, bytes and share of the limit of each kind of launch, for one batch and context.

    python -m cellar.bench.step.command --model llama-3-8b --batch 32 --context 1024 --breakdown --json step.json
    python -m cellar.bench.step.command --from-json step.json --png step.png

Real steps through the executor, with prompts, slot tables and captured graphs as in service, the next one launched
before the last has ended. With --prompt each computes a fresh prompt of so many tokens, too. They are timed without a
profiler and with it (Kineto): the difference is what profiling costs. On an accelerator a launch is a kernel or a copy,
on the CPU an operation of torch; what lies between two is `idle`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from cellar import demo
from cellar.bench.step.breakdown import Breakdown, breakdown_from, by_kind, least_seconds, lines_of
from cellar.bench.step.figure import draw
from cellar.bench.step.kinds import Launch, Traffic, traffic
from cellar.bench.step.launches import Callers, cpu_launches, device_launches
from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError, ConfigError
from cellar.core.hardware import Profile
from cellar.core.messages import Emit, IntArray, RowOpen, Source, Spans, StepPlan, TableUpdate
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.reports.limits import Limits, describe, limits_of
from cellar.reports.models import model_spec
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.registry import shipped
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.local import open_local
from cellar.runtime.steps.masks import MaskBox

WARM_STEPS = 8
AHEAD = 2


class DecodeBench:
    """A model with a batch of contexts in its cache, ready to decode, each step with a new `prompt` of so many tokens
    beside them. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        context: int,
        *,
        num_steps: int,
        prompt: int = 0,
        dtype: str = "auto",
        device: str = "auto",
        enforce_eager: bool = False,
        machine_profile: str = "auto",
        num_threads: int | None = None,
        quantization: str | None = None,
    ) -> None:
        if batch < 1 or context < 1 or num_steps < 1:
            raise ConfigError(f"batch {batch}, context {context} and {num_steps} steps must each be at least 1.")
        if prompt < 0:
            raise ConfigError(f"prompt is {prompt}; it must be 0 (none) or a number of tokens.")
        rows = batch + (prompt > 0)
        # Two runs of the same positions, and what was decoded before them.
        longest = max(context + WARM_STEPS + num_steps, prompt + 1)
        options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "max_model_len": longest}
        options |= {"load_format": "dummy", "max_num_seqs": rows, "enforce_eager": enforce_eager}
        options |= {"machine_profile": machine_profile, "num_threads": num_threads, "skip_tokenizer_init": True}
        options |= {"quantization": quantization}
        config = EngineConfig.of(**options)
        size = config.cache.block_size
        self._columns = -(-longest // size)
        spec = _spec_of(config)
        cache = EngineConfig.of(**options, kv_cache_memory_bytes=rows * self._columns * spec.kv.chunk_nbytes())
        self._opened = open_local(cache)
        executor = self._opened.runtime.executor
        assert executor is not None
        self._executor: StepExecutor = executor
        self.spec: ModelSpec = self._opened.spec
        self.device = torch.device(self._opened.config.device.device)
        self.graphs = self.device.type != "cpu" and not enforce_eager
        self.batch, self.context, self.num_steps, self.prompt = batch, context, num_steps, prompt
        self._most = cache.on(self.device.type).schedule.max_num_batched_tokens or 2048
        if batch + prompt > self._most:
            self.close()
            raise ConfigError(
                f"a step has at most {self._most} tokens; ask for a prompt of {self._most - batch} or less."
            )
        self._said = np.random.default_rng(prompt).integers(0, self.spec.vocab_size, prompt).astype(np.int32)
        self._masks = MaskBox()
        self._number = 0
        while executor.prepare():
            pass  # until all sizes are captured, as in a server that has run for a while
        with self._settings():
            self._launch_all(list(self._prompts()))
            self._launch_all([self._decode(context + i) for i in range(WARM_STEPS)])

    def __enter__(self) -> DecodeBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model."""
        self._opened.runtime.close()

    def traffic(self) -> dict[str, Traffic]:
        """What a step needs, by kind, on average."""
        tokens, sampled = self.batch + self.prompt, self.batch + (self.prompt > 0)
        return traffic(self.spec, tokens, self._seen / tokens, sampled)

    def least(self) -> Traffic:
        """Of a whole step: weights and KV once, as the planner counts them."""
        tokens, sampled = self.batch + self.prompt, self.batch + (self.prompt > 0)
        nbytes = self.spec.step_nbytes(round(self.batch * self._position))
        return Traffic(nbytes, self.spec.flops(tokens, round(self._seen / tokens), sampled))

    @property
    def _position(self) -> float:
        """Of decodes, on average."""
        return self.context + WARM_STEPS + (self.num_steps + 1) / 2

    @property
    def _seen(self) -> float:
        """Positions that the tokens of a step attend to, added up."""
        return self.batch * self._position + self.prompt * (self.prompt + 1) / 2

    def seconds(self) -> float:
        """Of one step: the mean of `num_steps`, the better of two runs."""
        with self._settings():
            return min(self._timed(self._steps()) for _ in range(2))

    def profiled(self) -> tuple[float, list[Launch]]:
        """Seconds of one step under the profiler, and the launches of `num_steps`, by start."""
        with self._settings():
            if self.device.type != "cpu":
                with profile(activities=[ProfilerActivity.CUDA]):
                    # The first launches under a profiler wait for its setup.
                    self._launch_all(self._steps()[:2])
                with profile(activities=[ProfilerActivity.CUDA]) as found:
                    seconds = self._timed(self._steps())
                return seconds, device_launches(found)
            with profile(activities=[ProfilerActivity.CPU]) as found, Callers():
                traced_seconds = self._timed(self._steps())
            sources = cpu_launches(found)
            with profile(activities=[ProfilerActivity.CPU]) as found:
                seconds = self._timed(self._steps())
            launches = cpu_launches(found)
            # Asking who called slows everything; the same steps without that have the times.
            if [launch.name for launch in launches] != [launch.name for launch in sources]:
                return traced_seconds, sources
            pairs = zip(launches, sources, strict=True)
            return seconds, [Launch(a.name, a.start, a.stop, b.source) for a, b in pairs]

    def _timed(self, plans: Sequence[StepPlan]) -> float:
        begin = time.perf_counter()
        self._launch_all(plans)
        return (time.perf_counter() - begin) / len(plans)

    def _launch_all(self, plans: Sequence[StepPlan]) -> None:
        """In order, at most `AHEAD` at once."""
        pending: deque[Any] = deque()
        for plan in plans:
            pending.append(self._executor.launch(plan, self._masks))
            if len(pending) >= AHEAD:
                pending.popleft()()
        for finish in pending:
            finish()

    def _steps(self) -> list[StepPlan]:
        first = self.context + WARM_STEPS
        return [self._decode(first + i) for i in range(self.num_steps)]

    def _decode(self, position: int) -> StepPlan:
        """Each row a token, and a prompt in a row of its own, which begins anew."""
        rows = np.arange(self.batch + (self.prompt > 0), dtype=np.int32)
        start, stop = np.full(len(rows), position, np.int32), np.full(len(rows), position + 1, np.int32)
        source = np.full(len(rows), Source.DEVICE, np.int32)
        start[self.batch :], stop[self.batch :], source[self.batch :] = 0, self.prompt, Source.HOST
        return self._plan(rows, start, stop, source, Emit.LAST, self._said, rows[self.batch :])

    def _prompts(self) -> Iterator[StepPlan]:
        """Random prompts, as many tokens a step as the schedule allows."""
        rng = np.random.default_rng((self.batch, self.context))
        together = max(1, self._most // self.context)
        for first in range(0, self.batch, together):
            rows = np.arange(first, min(first + together, self.batch), dtype=np.int32)
            for start in range(0, self.context, self._most):
                stop = min(start + self._most, self.context)
                tokens = rng.integers(0, self.spec.vocab_size, len(rows) * (stop - start)).astype(np.int32)
                first_position, end = (np.full(len(rows), at, np.int32) for at in (start, stop))
                emit = Emit.LAST if stop == self.context else Emit.NONE
                opened = rows if start == 0 else rows[:0]
                yield self._plan(
                    rows, first_position, end, np.full(len(rows), Source.HOST, np.int32), emit, tokens, opened
                )

    def _plan(
        self,
        rows: IntArray,
        start: IntArray,
        stop: IntArray,
        source: IntArray,
        emit: Emit,
        tokens: IntArray,
        opened: IntArray,
    ) -> StepPlan:
        self._number += 1
        columns = np.arange(self._columns, dtype=np.int32)
        table = TableUpdate(
            opened.repeat(self._columns),
            np.tile(columns, len(opened)),
            (opened[:, None] * np.int32(self._columns) + columns).reshape(-1),
        )
        count = len(rows)
        return StepPlan(
            step=self._number,
            spans=Spans(rows, start, stop, source, np.full(count, emit, np.int32)),
            tokens=tokens,
            table=table,
            opens=tuple(RowOpen(int(row), SamplingParams(temperature=0.0)) for row in opened),
        )

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """As the runtime's worker has them."""
        threads = self._opened.config.device.num_threads
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            if self.device.type == "cpu":
                yield
            else:
                with torch.cuda.device(self.device):
                    yield


def measure(bench: DecodeBench, model: str, limits: Limits) -> Breakdown:
    """Both runs of the steps, sorted by kind."""
    seconds = bench.seconds()
    profiled_seconds, launches = bench.profiled()
    return Breakdown(
        model=model,
        device=describe(bench.device),
        dtype=bench.spec.dtype,
        batch=bench.batch,
        context=bench.context,
        graphs=bench.graphs,
        num_steps=bench.num_steps,
        seconds=seconds,
        profiled_seconds=profiled_seconds,
        limits=limits,
        limit_seconds=least_seconds(bench.least(), limits),
        kinds=by_kind(launches, bench.spec, bench.traffic(), bench.num_steps, limits),
        prompt=bench.prompt,
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What to measure, and where to put what was found. `model` None: the demo model."""

    model: str | None = None
    batch: int = 1
    context: int = 1024
    steps: int = 32
    prompt: int = 0
    breakdown: bool = False
    device: str = "auto"
    dtype: str = "auto"
    eager: bool = False
    num_threads: int | None = None
    machine_profile: str = "auto"
    quantization: str | None = None
    json: Path | None = None
    from_json: Path | None = None
    png: Path | None = None


def run(options: StepOptions) -> None:
    """Do what the options ask for, and print it."""
    found = _measured(options) if options.from_json is None else breakdown_from(_read(options.from_json))
    if isinstance(found, float):
        beside = f" + {options.prompt}" if options.prompt else ""
        print(f"{options.model or 'demo'}, {options.batch} x {options.context}{beside}: {found * 1e3:.3f} ms a step")
        shape = {"batch": options.batch, "context": options.context, "prompt": options.prompt}
        print(json.dumps({**shape, "seconds": found}))
        return
    print("\n".join(lines_of(found)))
    if options.png is not None:
        draw(found, options.png)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    print(found.to_json())


def _measured(options: StepOptions) -> Breakdown | float:
    """The breakdown, or the seconds alone if nothing else was asked for."""
    if (options.png is not None or options.json is not None) and not options.breakdown:
        raise ConfigError("json and png hold a breakdown; add --breakdown.")
    with DecodeBench(
        options.model or str(demo.path()),
        options.batch,
        options.context,
        num_steps=options.steps,
        prompt=options.prompt,
        dtype=options.dtype,
        device=options.device,
        enforce_eager=options.eager,
        machine_profile=options.machine_profile,
        num_threads=options.num_threads,
        quantization=options.quantization,
    ) as bench:
        if not options.breakdown:
            return bench.seconds()
        return measure(bench, options.model or "demo", _limits(bench, options.machine_profile))


def parser() -> argparse.ArgumentParser:
    """The options of this module."""
    made = argparse.ArgumentParser(
        prog="python -m cellar.bench.step.command", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--model", help="directory, or the name of a shipped config; default: the demo model")
    made.add_argument("--batch", type=int, default=1)
    made.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    made.add_argument("--steps", type=int, default=32, help="steps measured")
    made.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that each step computes beside decodes")
    made.add_argument("--breakdown", action="store_true", help="by kind of launch, through the profiler")
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--num-threads", type=int)
    made.add_argument("--machine-profile", default="auto", help="auto, none, a file, or the name of a shipped profile")
    made.add_argument("--quantization", choices=("int4", "int8", "fp8"), help="of the weights, on loading")
    made.add_argument("--json", type=Path, help="file for the breakdown")
    made.add_argument("--from-json", type=Path, help="show and draw a breakdown that was written before")
    made.add_argument("--png", type=Path, help="file for the figure")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    try:
        run(StepOptions(**vars(parser().parse_args(arguments))))
    except CellarError as error:
        sys.exit(str(error))


def _limits(bench: DecodeBench, machine_profile: str) -> Limits:
    named = None
    if machine_profile not in ("auto", "none"):
        path = Path(machine_profile)
        named = Profile.load(path) if path.is_file() else shipped(machine_profile)
    return limits_of(str(bench.device), bench.spec.dtype, named)


def _spec_of(config: EngineConfig) -> ModelSpec:
    kind = resolve_device(config.device.device).type
    return model_spec(config.model.model, kind, config.model.dtype, config.model.max_model_len)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a file that --json wrote.") from error


if __name__ == "__main__":
    main()
