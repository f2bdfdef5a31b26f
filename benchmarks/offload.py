"""A model on a device held to a part of it: what a pass moves, at which rates, and what of its limit is reached.

    python -m benchmarks.offload MODEL --device-memory 0.5 --host-memory 0.5 --disk 4
    python -m benchmarks.offload opt-30b --load-format dummy --device cuda --device-memory 16 --batch 78 --once
    python -m benchmarks.offload llama-3-70b --load-format dummy --device cuda --device-memory 16 --quantization int4
    python -m benchmarks.offload opt-30b --load-format dummy --device cuda --device-memory 16 --pipeline-parallel-size 2
    python -m benchmarks.offload opt-30b --load-format dummy --device cuda --device-memory 16 --without overlap

Prints a table of the last run, predicted by the plan and measured, by kind of step and by channel, then one JSON
object: bytes by place, the rates that reading the weights back had, the limit (bytes / rate), the seconds of a decode
pass; with --resident, the resident engine's tokens beside ours. Where a part lies on disk, the decode passes are
measured ROUNDS times, each between two looks at the rate that the disk has alone: the share is bytes that passes read
in a second / the mean of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cellar import LLM, SamplingParams
from cellar.bench.forecast import Forecast
from cellar.bench.offline import SETTLE_SECONDS
from cellar.core.config import EngineConfig
from cellar.core.messages import StepPlan, StepResult
from cellar.engine import own_plan
from cellar.engine.measured_price import measured_price
from cellar.engine.opened import open_front
from cellar.planner import capped
from cellar.planner import moves as moves_planned
from cellar.planner.passes import predicted_line
from cellar.reports.forecast import predict
from cellar.runtime.offload import layers
from cellar.runtime.offload import opened as opened_layers
from cellar.runtime.offload.opened import OffloadReport
from cellar.runtime.offload.reads import DiskReads
from cellar.server.engine_process import SWITCH_SECONDS

ROUNDS = 5
LOOK_SECONDS = 0.5
TELL_SECONDS = 20.0


class SlowDisk:
    """Reads that come no faster than `rate` bytes/s together. What it could have brought while nobody asked is lost."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._plain = os.preadv
        self._lock = threading.Lock()
        self._free = 0.0

    def read(self, file: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        """As `os.preadv`."""
        count = self._plain(file, buffers, offset, flags)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + count / self._rate
            wait = self._free - time.perf_counter()
        time.sleep(max(0.0, wait))
        return count


class Told(Forecast):
    """A forecast that says every so often how far the steps have come: a run may take minutes, or be ended."""

    def __init__(self) -> None:
        super().__init__()
        self._said = time.perf_counter()
        self._steps = self._tokens = 0

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """One more."""
        super().observe(plan, result)
        self._steps, self._tokens = self._steps + 1, self._tokens + len(result.tokens)
        seconds = time.perf_counter() - self._said
        if seconds > TELL_SECONDS:
            print(f"{self._steps} steps, {self._tokens} tokens in {seconds:.0f} s", file=sys.stderr, flush=True)
            self._said, self._steps, self._tokens = time.perf_counter(), 0, 0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--device-memory", type=float, required=True)
    parser.add_argument("--host-memory", type=float, default=None)
    parser.add_argument("--disk", type=float, default=None)
    parser.add_argument("--disk-path", default=None)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None, help="Default: all prompts in one pass.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=None)
    parser.add_argument("--slow-disk", type=float, default=None, help="As if the disk brought so many GB/s at most.")
    parser.add_argument(
        "--link-reads",
        type=float,
        default=None,
        help="Of the link's rate, what attention over it reaches; 0: the CPU alone attends in host memory.",
    )
    parser.add_argument("--cpu-tokens", type=int, help="Passes of so many use the CPU's products.")
    parser.add_argument(
        "--without",
        choices=("overlap", "cpu-attention", "kv-in-host"),
        help="As in FlexGen's table 5: nothing is on its way while a layer computes, or the device attends over the "
        "link; the plan's price is that of a run with it. Or all K and V lie on the device, as DeepSpeed has them.",
    )
    parser.add_argument("--once", action="store_true", help="One run: no seconds of a decode pass of its own.")
    parser.add_argument("--warm", action="store_true", help="All of it once before, so that no kernel is compiled.")
    parser.add_argument("--resident", action="store_true", help="Run the resident engine, too, and compare tokens.")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)  # as a server does
    most = 0 if options.without == "kv-in-host" else options.cpu_tokens  # where all KV is there the CPU does nothing
    if most is not None:
        moves_planned.most_tokens = layers.most_tokens = lambda **_: most  # type: ignore[attr-defined]
    if options.without == "overlap":
        layers.NUM_SLOTS = opened_layers.NUM_SLOTS = 1  # type: ignore[attr-defined]
    if options.without == "cpu-attention":
        capped.kv_over_link = lambda *_: 1.0  # type: ignore[attr-defined]
    if options.without == "kv-in-host":
        choices = capped._kv_choices
        capped._kv_choices = lambda *args, **named: [
            (place, kv) for place, kv in choices(*args, **named) if place == "device"
        ]
    if options.link_reads is not None:
        own_plan.LINK_READS = own_plan.LINK_READS_OF_CODES = options.link_reads  # type: ignore[attr-defined]
    if options.slow_disk is not None:
        os.preadv = SlowDisk(options.slow_disk * 1e9).read  # type: ignore[assignment]
    rest: dict[str, Any] = {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_num_seqs": options.batch,
        "max_model_len": options.prompt + options.generate,
        "max_num_batched_tokens": options.max_num_batched_tokens or options.batch * options.prompt,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "device": options.device,
        "num_threads": options.num_threads,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "tensor_parallel_size": options.tensor_parallel_size,
    }
    prompts = [[(7 * k + i) % 200 + 3 for i in range(options.prompt)] for k in range(options.batch)]
    places = {name: getattr(options, name) for name in ("device_memory", "host_memory", "disk", "disk_path")}
    found: dict[str, Any] = {"batch": options.batch, "prompt": options.prompt, "generate": options.generate}
    begin = time.perf_counter()
    kv = options.kv_cache_memory_bytes
    forecast = Told()
    config = EngineConfig.of(model=options.model, **rest, **places, kv_cache_memory_bytes=kv)
    price = measured_price(config)
    opened = open_front(config, wrap=forecast.wrap)
    with LLM.over(opened) as llm:
        found["start_seconds"] = time.perf_counter() - begin
        said_before = "" if llm.plan is None else predicted_line(llm.plan)
        print(f"there after {found['start_seconds']:.1f} s; {said_before}", file=sys.stderr, flush=True)
        report = llm.offload
        _seconds(llm, prompts[:1], 2)  # kernels are compiled, buffers made
        if options.warm:
            _seconds(llm, [[1, 1, *prompt[2:]] for prompt in prompts], options.generate)
            time.sleep(SETTLE_SECONDS)  # graphs of sizes that were met are recorded
        begun = _channels(report)
        first = 0.0 if options.once else _seconds(llm, prompts, 1)[0]
        before = _channels(report)
        predict(forecast, opened, price=price)
        retries = _retries()
        seconds, tokens = _seconds(llm, prompts, options.generate)
        said = forecast.report(options.batch * options.generate, seconds)
        print("\n".join([] if said is None else said.lines()), flush=True)
        found["forecast"] = None if said is None else said.to_dict()
        found["channel_seconds"] = {name: s - before[name] for name, s in _channels(report).items()}
        passes = options.generate - 1
        found["decode_channel_seconds_a_pass"] = {
            name: (s - before[name] + begun[name]) / passes for name, s in found["channel_seconds"].items()
        }
        if llm.plan is not None:
            found["predicted"] = dict(llm.plan.figures)
        found["ranks"] = [
            {"weights": dict(one.weights), "kv": one.kv, "kv_place": one.kv_place} for one in opened.offloads
        ]
        found["device_reserved"] = _reserved()
        found["allocator_retries"] = _retries() - retries
        if report is not None and report.moved["disk"] and not options.once:
            path = None if options.disk_path is None else Path(options.disk_path)
            rounds = [_disk_round(llm, report, prompts, options.generate, path) for _ in range(ROUNDS)]
            found["disk_rounds"] = rounds
            found["share_of_the_disks_rate"] = median(one["share"] for one in rounds)
    found |= {
        "first_seconds": first,
        "seconds": seconds,
        "decode_seconds_a_pass": (seconds - first) / (options.generate - 1),
        "tokens_per_second": options.batch * options.generate / seconds,
    }
    if report is not None:
        found |= {
            "weights": dict(report.weights),
            "kv": report.kv,
            "kv_place": report.kv_place,
            "by_cpu_in_passes_of_few_tokens": report.by_cpu,
            "ring": report.ring,
            "moved_a_pass": dict(report.moved),
            "rates_of_reading_back": dict(report.rates),
            "o_direct": report.direct,
            "limit_seconds_a_pass": report.limit,
            "share_of_limit": report.limit / found["decode_seconds_a_pass"],
        }
    if options.resident:
        with LLM(options.model, **rest, kv_cache_memory_bytes=None if report is None else report.kv) as llm:
            first = _seconds(llm, prompts, 1)[0]
            seconds, resident = _seconds(llm, prompts, options.generate)
        found["resident_decode_seconds_a_pass"] = (seconds - first) / (options.generate - 1)
        found["tokens_equal"] = tokens == resident
    print(json.dumps(found))


def _disk_round(
    llm: LLM, report: OffloadReport, prompts: list[list[int]], generate: int, path: Path | None
) -> dict[str, float]:
    """Bytes/s that decode passes read, beside what the same reader reads alone right before and after."""
    moved = report.moved["disk"]
    with DiskReads(path, moved // llm.spec.num_layers) as reads:
        before = reads.rate_while(lambda: time.sleep(LOOK_SECONDS))[0]
        first = _seconds(llm, prompts, 1)[0]
        busy, waited = _channels(report), time.perf_counter()
        seconds = (_seconds(llm, prompts, generate)[0] - first) / (generate - 1)
        waited = time.perf_counter() - waited
        time.sleep(4 * LOOK_SECONDS)  # the next layers are on their way into the ring
        after = reads.rate_while(lambda: time.sleep(LOOK_SECONDS))[0]
    channels = {name: s - busy[name] for name, s in _channels(report).items()}
    share = moved / seconds / ((before + after) / 2)
    rates = {"before": before, "during": moved / seconds, "after": after, "share": share, "pass_seconds": seconds}
    return rates | {f"{name}_busy_share": s / waited for name, s in channels.items()}


def _channels(report: OffloadReport | None) -> dict[str, float]:
    """Seconds that each way has been busy so far."""
    return {} if report is None else report.channels.seconds()


def _reserved() -> int:
    """Bytes that torch has taken of an accelerator."""
    import torch

    return int(torch.cuda.memory_reserved()) if torch.cuda.is_available() else 0


def _retries() -> int:
    """How often torch has given memory back to an accelerator's driver so far, to ask for it in another size."""
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else 0


def _seconds(llm: LLM, prompts: list[list[int]], generate: int) -> tuple[float, list[list[int]]]:
    """Seconds of so many tokens of each, none of whose prompts is in the cache; and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=generate, ignore_eos=True)
    fresh = [[generate, *prompt[1:]] for prompt in prompts]
    begin = time.perf_counter()
    results = llm.generate(fresh, params, use_tqdm=False)
    return time.perf_counter() - begin, [one.outputs[0].token_ids for one in results]


if __name__ == "__main__":
    main()
