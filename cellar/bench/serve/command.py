"""`cellar bench serve`: load against any server with OpenAI's API, and what its users would have felt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cellar.bench.serve.cached import cache_section
from cellar.bench.serve.client import LoadClient
from cellar.bench.serve.comparison import Comparison
from cellar.bench.serve.options import DatasetOptions, ResultOptions, TargetOptions, TrafficOptions, pairs
from cellar.bench.serve.prompts import ChatScript, Script, TokenScript, choose_vocabulary
from cellar.bench.serve.run import Run, run_load
from cellar.bench.workload import LengthRange
from cellar.bench.workloads import (
    Conversation,
    Load,
    gamma_arrivals,
    is_sharegpt_text,
    length_range,
    prefix_requests,
    random_conversations,
    random_requests,
    read_lengths,
    read_trace,
    sharegpt_lengths,
    sharegpt_texts,
    with_think_times,
)
from cellar.core.errors import ConfigError, RequestError
from cellar.reports.load import LoadReport, Section, plot_cdfs, plot_sweep, write_csv
from cellar.text.tokenizer import Tokenizer

Say = Callable[[str], None]
T = TypeVar("T")

CHAT_MARGIN = 64
"""Tokens of the context that a chat leaves free for its template, and for words that take more tokens than meant."""


@dataclass(frozen=True)
class ServeBench:
    """A load test; `run` does it."""

    target: TargetOptions
    dataset: DatasetOptions
    traffic: TrafficOptions
    results: ResultOptions

    def run(self, say: Say, warn: Say) -> list[LoadReport]:
        """Test, tell, and write the files that were asked for. Raises ConfigError, or RequestError if all failed."""
        if self.target.compare is not None:
            return self._compare(self.target.compare, say, warn)
        tokenizer = None if self.target.tokenizer is None else Tokenizer.load(self.target.tokenizer)
        load = build_load(self.dataset, tokenizer)
        _allow_connections()
        writes = self.results.save_result or self.results.plot
        folder = self._folder() if writes else Path()
        model, runs = _run_loop(self._test(load, tokenizer, say, warn))
        reports = [report for report, _ in runs]
        if len(reports) > 1:
            for line in table(reports):
                say(line)
        if writes:
            self._write(folder / self._stem(model), model, runs, say)
        say(json.dumps([r.to_dict() for r in reports] if len(reports) > 1 else reports[0].to_dict()))
        if not any(report.completed for report in reports):
            raise RequestError(f"all requests failed; the most common error: {reports[0].errors[0][0]}.")
        return reports

    def _compare(self, address: str, say: Say, warn: Say) -> list[LoadReport]:
        """Load both servers in turns, whoever was second before goes first."""
        if len(self._points()) > 1:
            raise ConfigError("compare takes one request rate and one concurrency; leave the sweep out.")
        if self.results.plot:
            raise ConfigError("plot has no effect with compare; leave it out.")
        tokenizer = None if self.target.tokenizer is None else Tokenizer.load(self.target.tokenizer)
        _allow_connections()
        folder = self._folder() if self.results.save_result else Path()
        targets = (self.target, replace(self.target, base_url=address, compare=None))
        rounds, model = list[tuple[LoadReport, LoadReport]](), ""
        for number in range(self.target.compare_rounds):
            dataset = replace(self.dataset, seed=self.dataset.seed + (number << 20))
            load, found = build_load(dataset, tokenizer), dict[int, LoadReport]()
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                bench = replace(self, target=targets[side], dataset=dataset)
                name, ((report, _),) = _run_loop(bench._test(load, tokenizer, _silent, warn))
                if not report.completed:
                    raise RequestError(f"all requests to {targets[side].root} failed ({report.errors[0][0]}).")
                model, found[side] = model or name, report
                say(
                    f"round {number + 1} of {self.target.compare_rounds}, {('first', 'second')[side]}: "
                    f"{report.request_throughput:.2f} requests/s, {report.output_throughput:.1f} output tokens/s, "
                    f"{report.failed} failed"
                )
            rounds.append((found[0], found[1]))
        comparison = Comparison(targets[0].root, targets[1].root, rounds)
        for line in comparison.lines():
            say(line)
        if self.results.save_result:
            path = folder / f"{self._stem(model)}-compare.json"
            path.write_text(json.dumps(comparison.to_dict()) + "\n", encoding="utf-8")
            say(f"written: {path}")
        say(json.dumps(comparison.to_dict()["ratios"]))
        return [report for pair in rounds for report in pair]

    # -- the test ---------------------------------------------------------------------------------

    async def _test(
        self, load: Load, tokenizer: Tokenizer | None, say: Say, warn: Say
    ) -> tuple[str, list[tuple[LoadReport, Run]]]:
        """-> the model's name, and each run."""
        target, found = self.target, list[tuple[LoadReport, Run]]()
        async with LoadClient.open(target.root, target.url, target.headers()) as client:
            model, context = await self._model(client)
            load = self._fitting(load, self.dataset.max_context_len or context, say)
            await self._try(client, load, model, tokenizer)
            for number, (rate, bound) in enumerate(self._points()):
                # Other tokens in every run: a server's cache must not know them from the run before.
                script = await self._script(client, load, model, tokenizer, self.dataset.seed + number)
                paced = load if rate is None else self._paced(load, rate)
                run = await self._measured(client, paced, script, bound)
                report = self._report(run, _offered(paced), bound)
                for line in report.lines():
                    say(line)
                for error, count in report.errors[:3]:
                    warn(f"{count} failed: {error}")
                for warning in run.client.warnings(report.summaries["ttft"].median, bool(paced.arrivals.any())):
                    warn(warning)
                found.append((report, run))
        return model, found

    def _points(self) -> list[tuple[float | None, int | None]]:
        """Rate and bound of each run."""
        return [(rate, bound) for rate in self.traffic.rates for bound in self.traffic.concurrencies]

    def _paced(self, load: Load, rate: float) -> Load:
        arrivals = gamma_arrivals(len(load.conversations), rate, self.traffic.burstiness, self.dataset.seed)
        return replace(load, arrivals=arrivals)

    async def _model(self, client: LoadClient) -> tuple[str, int | None]:
        """The model's name, and its context if the server tells it."""
        end = time.monotonic() + self.target.ready_check_timeout_sec
        while True:
            try:
                listed = await client.get("/v1/models")
                break
            except ConfigError:
                if time.monotonic() >= end:
                    if self.target.model is not None and self.target.ready_check_timeout_sec == 0:
                        return self.target.model, None  # a server without the list; the first request will tell
                    raise
                await asyncio.sleep(0.5)
        cards = [card for card in listed.get("data", ()) if isinstance(card, dict)] if isinstance(listed, dict) else []
        served = [card for card in cards if self.target.model in (None, card.get("id"))]
        if self.target.model is None and not served:
            raise ConfigError(f"the server at {self.target.root} lists no model; give model.")
        context = served[0].get("max_model_len") if served else None
        return self.target.model or str(served[0]["id"]), context if isinstance(context, int) else None

    def _fitting(self, load: Load, context: int | None, say: Say) -> Load:
        if context is None:
            return load
        room = context - (CHAT_MARGIN if self.target.chats else 0)
        kept = load.within(room)
        if not kept.conversations:
            raise ConfigError(
                f"no request of the dataset fits a context of {room} tokens; ask for shorter ones, or give "
                "max_context_len."
            )
        if (left := load.num_requests - kept.num_requests) > 0:
            say(f"{left} of {load.num_requests} requests do not fit a context of {room} tokens and are left out.")
        return kept

    async def _try(self, client: LoadClient, load: Load, model: str, tokenizer: Tokenizer | None) -> None:
        """One request before all others: whatever is wrong with the options shows here. Then the warm-up."""
        count = min(max(1, self.traffic.num_warmups), len(load.conversations))
        few = Load(tuple(Conversation(c.turns[:1]) for c in load.conversations[:count]), np.zeros(count))
        script = await self._script(client, few, model, tokenizer, self.dataset.seed + (1 << 32))
        run = await run_load(client, Load(few.conversations[:1], few.arrivals[:1]), script)
        if (error := run.timings[0].error) is not None:
            raise ConfigError(f"the first request to {self.target.url} failed ({error}); change the options it names.")
        if self.traffic.num_warmups:
            await run_load(client, few, script, max_concurrency=self.traffic.concurrencies[-1])

    async def _script(
        self, client: LoadClient, load: Load, model: str, tokenizer: Tokenizer | None, seed: int
    ) -> Script:
        target = self.target
        vocabulary = choose_vocabulary(tokenizer, self.dataset.vocab_size, seed)
        fields: dict[str, Any] = {
            "model": model,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.extra(),
        }
        if not target.chats:
            return TokenScript(load, vocabulary, fields, target.ignore_eos, tokenizer)
        decode = _locally(tokenizer) if tokenizer is not None else _by_server(client, model)
        return await ChatScript.spelled(load, vocabulary, fields, target.ignore_eos, decode)

    async def _measured(self, client: LoadClient, load: Load, script: Script, bound: int | None) -> Run:
        from tqdm.auto import tqdm

        with tqdm(total=load.num_requests, disable=self.traffic.disable_tqdm, dynamic_ncols=True) as bar:
            session = f"bench-{uuid.uuid4().hex[:8]}" if self.dataset.multi_turn else None
            run = await run_load(client, load, script, bound, session, lambda answer: bar.update(1))
        if run.unsent:
            bar.write(f"{run.unsent} turns were not sent, because one before them failed.")
        return run

    def _report(self, run: Run, rate: float | None, bound: int | None) -> LoadReport:
        labels = []
        if len(self.traffic.rates) > 1:
            labels.append("rate inf" if rate is None else f"rate {rate:g}")
        if len(self.traffic.concurrencies) > 1:
            labels.append(f"concurrency {bound}")
        return LoadReport.of(
            run.timings,
            run.duration,
            metrics=self.results.metrics,
            percentiles=self.results.percentiles,
            goodput=self.results.bounds(),
            request_rate=rate,
            max_concurrency=bound,
            label=" ".join(labels),
            sections=(run.client.section(), *self._turns(run), *cache_section(run.answers)),
        )

    def _turns(self, run: Run) -> tuple[Section, ...]:
        """Time to first token of first turns beside later ones: what a cache of conversations would show."""
        if not self.dataset.multi_turn:
            return ()
        rows = []
        for label, key, later in (("first turns", "first_turns", False), ("later turns", "later_turns", True)):
            times = [t.ttft for t in run.timings if t.ok and (t.turn > 0) is later]
            median = float(np.median(times)) * 1e3 if times else float("nan")
            rows.append((f"Median TTFT of {label} (ms)", f"median_ttft_{key}_ms", median))
        return (Section("Conversations", tuple(rows)),)

    # -- files ------------------------------------------------------------------------------------

    def _folder(self) -> Path:
        """Where files go; made before the run, so that it cannot fail after it."""
        folder = Path(self.results.result_dir or ".").expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"result_dir {folder} cannot be made ({error.strerror}); give another.") from error
        return folder

    def _stem(self, model: str) -> str:
        """Names of files without their suffix, as vLLM makes them."""
        results, traffic = self.results, self.traffic
        if results.result_filename is not None:
            return results.result_filename.removesuffix(".json")
        parts = [results.label or self.target.backend, f"{traffic.request_rate or 'inf'}qps"]
        if traffic.max_concurrency is not None:
            parts.append(f"concurrency{traffic.max_concurrency}")
        parts += [model.rstrip("/").split("/")[-1], datetime.now().strftime("%Y%m%d-%H%M%S")]
        return "-".join(parts).replace(",", "_")

    def _write(self, stem: Path, model: str, runs: Sequence[tuple[LoadReport, Run]], say: Say) -> None:
        reports = [report for report, _ in runs]
        title = f"{model}, {self.dataset.dataset_name}"
        written = {suffix: stem.with_name(stem.name + suffix) for suffix in self._suffixes(len(runs))}
        for suffix, path in written.items():
            match suffix:
                case ".json":
                    found = [self._described(model, report, run) for report, run in runs]
                    path.write_text(json.dumps(found if len(found) > 1 else found[0]) + "\n", encoding="utf-8")
                case ".csv":
                    write_csv(reports, path)
                case ".png":
                    plot_sweep({"": reports}, path, title)
                case _:
                    plot_cdfs({report.label or "all": report for report in reports}, path, title)
            say(f"written: {path}")

    def _suffixes(self, num_runs: int) -> list[str]:
        """Kinds of files that were asked for."""
        found = [".json"] if self.results.save_result else []
        if self.results.save_result and num_runs > 1:
            found += [".csv", ".png"]
        return [*found, "-cdf.png"] if self.results.plot else found

    def _described(self, model: str, report: LoadReport, run: Run) -> dict[str, Any]:
        """The JSON of one run, by vLLM's keys."""
        target = self.target
        found: dict[str, Any] = {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": target.backend,
            "backend": target.backend,
            "model_id": model,
            "tokenizer_id": target.tokenizer,
            "num_prompts": self.dataset.num_prompts,
            "dataset_name": self.dataset.dataset_name,
            "burstiness": self.traffic.burstiness,
            "seed": self.dataset.seed,
            **pairs(self.results.metadata, "metadata"),
            **report.to_dict(),
        }
        if self.results.save_detailed:
            found |= {
                "start_times": [t.arrival for t in run.timings],
                "input_lens": [t.prompt_tokens for t in run.timings],
                "output_lens": [t.output_tokens for t in run.timings],
                "ttfts": [t.ttft if t.ok else None for t in run.timings],
                "itls": [t.gaps.tolist() for t in run.timings],
                "generated_texts": ["".join(answer.text) for answer in run.answers],
                "errors": [t.error or "" for t in run.timings],
                "conversations": [t.conversation for t in run.timings],
                "turns": [t.turn for t in run.timings],
            }
        return found


def build_load(options: DatasetOptions, tokenizer: Tokenizer | None = None) -> Load:
    """What the options ask for; all at once, but a trace at its own times. Raises ConfigError."""
    seed, count = options.seed, options.num_prompts
    conversations: tuple[Conversation, ...]
    match options.dataset_name:
        case "trace":
            return read_trace(_path(options)).load(count, options.trace_speedup, seed, options.trace_copies)
        case "prefix" | "prefix_repetition":
            conversations = prefix_requests(
                count,
                options.prefix_repetition_prefix_len,
                options.prefix_repetition_suffix_len,
                options.prefix_repetition_num_prefixes,
                options.prefix_repetition_output_len,
                seed,
            )
        case "sharegpt":
            conversations = _sharegpt(options, tokenizer)
        case "random" if options.multi_turn:
            conversations = random_conversations(
                count,
                LengthRange.parse(options.num_turns, "num_turns"),
                length_range(options.random_input_len, options.random_range_ratio, "random_input_len"),
                length_range(options.random_output_len, options.random_range_ratio, "random_output_len"),
                options.random_prefix_len,
                seed,
            )
        case _:
            conversations = random_requests(
                count,
                options.random_input_len,
                options.random_output_len,
                options.random_range_ratio,
                options.random_prefix_len,
                seed,
            )
    if options.multi_turn:
        conversations = with_think_times(conversations, options.think_time, options.think_time_distribution, seed)
    return Load(conversations, np.zeros(len(conversations)))


def table(reports: Sequence[LoadReport]) -> list[str]:
    """A sweep at one glance: a line per run."""
    shown = reports[0].shown
    high_name = (
        f"p{reports[0].summaries['ttft'].percentiles[-1][0]:g}" if reports[0].summaries["ttft"].percentiles else "p50"
    )
    heads = " ".join(f"{f'{name} p50/{high_name}, ms':>20}" for name in shown)
    lines = [f"{'run':<18} {'req/s':>8} {'out tok/s':>10} {heads}".rstrip()]
    for report in reports:
        cells = []
        for name in shown:
            summary = report.summaries[name]
            high = summary.percentiles[-1][1] if summary.percentiles else summary.median
            cells.append(f"{f'{summary.median * 1e3:.1f} / {high * 1e3:.1f}':>20}")
        lines.append(
            f"{report.label:<18} {report.request_throughput:8.2f} {report.output_throughput:10.1f} " + " ".join(cells)
        )
    return lines


def _sharegpt(options: DatasetOptions, tokenizer: Tokenizer | None) -> tuple[Conversation, ...]:
    path, count, seed = _path(options), options.num_prompts, options.seed
    if is_sharegpt_text(path):
        if tokenizer is None:
            raise ConfigError("ShareGPT's JSON has texts, whose tokens must be counted; give a tokenizer.")
        return sharegpt_texts(
            path,
            count,
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            multi_turn=options.multi_turn,
            output_len=options.sharegpt_output_len,
            seed=seed,
        )
    return sharegpt_lengths(
        read_lengths(path), count, multi_turn=options.multi_turn, output_len=options.sharegpt_output_len, seed=seed
    )


def _path(options: DatasetOptions) -> Path:
    return Path(options.dataset_path or "").expanduser()


def _locally(tokenizer: Tokenizer) -> Callable[[list[int]], Awaitable[str]]:
    async def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    return decode


def _by_server(client: LoadClient, model: str) -> Callable[[list[int]], Awaitable[str]]:
    async def decode(ids: list[int]) -> str:
        try:
            found = await client.post("/detokenize", {"model": model, "tokens": ids})
            return str(found["prompt"])
        except (ConfigError, KeyError, TypeError) as error:
            raise ConfigError(f"random tokens cannot be decoded by the server ({error}); give a tokenizer.") from error

    return decode


def _offered(load: Load) -> float | None:
    """Conversations per second, if they do not all begin at once."""
    last = float(load.arrivals[-1])
    return len(load.arrivals) / last if last > 0 else None


def _allow_connections() -> None:
    """As many open connections as the system allows this process: the usual limit is 1024 files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _silent(line: str) -> None:
    """Of each run, a comparison tells its own line."""


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is installed: it costs about half of what asyncio's own loop does."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
