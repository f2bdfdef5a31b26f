"""Options of `cellar bench serve`, by vLLM's names where it has them; the rest is said in docs/bench.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from cellar.core.errors import ConfigError
from cellar.reports.load_metrics import GOODPUT_METRICS, METRICS


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which server, and what each request says besides its prompt."""

    backend: Literal["openai", "openai-chat", "vllm"] = _option(
        "openai", "openai: completions of token ids; openai-chat: chats; vllm is another name for openai."
    )
    base_url: str | None = _option(None, "Address such as http://localhost:8000; replaces host and port.")
    host: str = _option("127.0.0.1", "Host of the server.")
    port: int = _option(8000, "Port of the server.")
    endpoint: str | None = _option(None, "Path; default: /v1/completions or /v1/chat/completions.")
    model: str | None = _option(None, "Name of the model in the API; default: the server's first.")
    tokenizer: str | None = _option(
        None, "Directory with a tokenizer; default: the server's, where it has /detokenize."
    )
    api_key: str | None = _option(None, "Key sent as a bearer token.")
    header: list[str] | None = field(
        default=None, metadata={"help": "KEY=VALUE sent with each request; may be given several times."}
    )
    temperature: float = _option(0.0, "0 is greedy.")
    ignore_eos: bool = _option(False, "Generate the full length that the dataset asks for.")
    extra_body: str | None = _option(None, "JSON object whose fields are added to each request.")
    ready_check_timeout_sec: float = _option(0.0, "Seconds to wait for a server that does not answer yet.")
    compare: str | None = _option(None, "Address of a second server: both get the same load in turns; prints ratios.")
    compare_rounds: int = _option(3, "How often each of both is loaded.")

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be in [1, 65536).")
        if self.base_url is not None and urlsplit(self.base_url).scheme not in ("http", "https"):
            raise ConfigError(f"base_url is {self.base_url!r}; it must begin with http:// or https://.")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint is {self.endpoint!r}; it must begin with /.")
        if self.compare is not None and urlsplit(self.compare).scheme not in ("http", "https"):
            raise ConfigError(f"compare is {self.compare!r}; it must begin with http:// or https://.")
        if self.compare_rounds < 1:
            raise ConfigError(f"compare_rounds is {self.compare_rounds}; it must be at least 1.")
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; it must not be negative.")
        if self.ready_check_timeout_sec < 0:
            raise ConfigError(f"ready_check_timeout_sec is {self.ready_check_timeout_sec}; it must not be negative.")
        self.headers()
        self.extra()

    @property
    def root(self) -> str:
        """Address of the server without a path of the API."""
        if self.base_url is None:
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"http://{host}:{self.port}"
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.root + (self.endpoint or ("/v1/chat/completions" if self.chats else "/v1/completions"))

    @property
    def chats(self) -> bool:
        """True if requests are chats of text, not completions of token ids."""
        return self.backend == "openai-chat"

    def headers(self) -> dict[str, str]:
        """Headers of each request."""
        found = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return found | pairs(self.header, "header")

    def extra(self) -> dict[str, Any]:
        """Fields added to each body."""
        if self.extra_body is None:
            return {}
        try:
            found = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(
                f"extra_body is not JSON ({error}); give an object such as '{{\"top_p\": 0.9}}'."
            ) from error
        if not isinstance(found, dict):
            raise ConfigError("extra_body is not a JSON object; give one such as '{\"top_p\": 0.9}'.")
        return found


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What is asked. Lengths are in tokens."""

    dataset_name: Literal["random", "sharegpt", "prefix", "prefix_repetition", "trace"] = _option(
        "random",
        "random: random tokens; sharegpt: real lengths; prefix, prefix_repetition: shared prefixes; trace: a replay.",
    )
    dataset_path: str | None = _option(None, "File of sharegpt (lengths, or its JSON) or of a trace (.jsonl, .csv).")
    num_prompts: int = _option(1000, "Requests; conversations if multi_turn.")
    seed: int = _option(0, "Decides lengths, tokens, arrivals and think times.")
    random_input_len: int = _option(1024, "random: tokens of a prompt.")
    random_output_len: int = _option(128, "random: tokens of an answer.")
    random_range_ratio: float = _option(0.0, "random: lengths are uniform in [len * (1 - ratio), len * (1 + ratio)].")
    random_prefix_len: int = _option(0, "random: tokens that all prompts begin with.")
    sharegpt_output_len: int | None = _option(None, "sharegpt: tokens of every answer, instead of the real lengths.")
    prefix_repetition_prefix_len: int = _option(256, "prefix: tokens of each shared prefix.")
    prefix_repetition_suffix_len: int = _option(256, "prefix: tokens of each prompt after the shared prefix.")
    prefix_repetition_num_prefixes: int = _option(10, "prefix: number of shared prefixes.")
    prefix_repetition_output_len: int = _option(128, "prefix: tokens of an answer.")
    trace_speedup: float = _option(1.0, "trace: replay this many times as fast.")
    trace_copies: int = _option(1, "trace: replay so many at a time, each with texts of its own.")
    vocab_size: int | None = _option(None, "Random tokens are ids below this; default: the tokenizer's, or 1000.")
    max_context_len: int | None = _option(
        None, "Leave out turns that do not fit this many tokens with their answer; default: what the server says."
    )
    multi_turn: bool = _option(False, "Conversations: each turn is sent with all before it (random, sharegpt).")
    num_turns: str = _option("5", "random with multi_turn: turns of a conversation, a number or a range such as 2-8.")
    think_time: float = _option(10.0, "multi_turn: mean seconds between an answer and the next turn.")
    think_time_distribution: Literal["exponential", "constant"] = _option(
        "exponential", "multi_turn: how think times vary."
    )

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts is {self.num_prompts}; it must be at least 1.")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must not be negative.")
        needs_path = self.dataset_name in ("sharegpt", "trace")
        if needs_path and self.dataset_path is None:
            raise ConfigError(f"dataset {self.dataset_name} is read from a file; give its dataset_path.")
        if not needs_path and self.dataset_path is not None:
            raise ConfigError(f"dataset {self.dataset_name} is generated, not read; leave dataset_path out.")
        if self.multi_turn and self.dataset_name not in ("random", "sharegpt"):
            raise ConfigError(f"multi_turn is for the datasets random and sharegpt, not {self.dataset_name}.")
        for name in ("vocab_size", "max_context_len", "sharegpt_output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("random_prefix_len", "prefix_repetition_suffix_len"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if not self.trace_speedup > 0:
            raise ConfigError(f"trace_speedup is {self.trace_speedup}; it must be above 0.")
        if self.trace_speedup != 1.0 and self.dataset_name != "trace":
            raise ConfigError("trace_speedup has no effect without dataset trace; leave it out.")
        if self.trace_copies < 1:
            raise ConfigError(f"trace_copies is {self.trace_copies}; it must be at least 1.")
        if self.trace_copies != 1 and self.dataset_name != "trace":
            raise ConfigError("trace_copies has no effect without dataset trace; leave it out.")


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """When requests are sent."""

    request_rate: str | None = _option(
        None, "Requests (multi_turn: conversations) per second; default: inf, a trace's own. 1,2,4 is a sweep."
    )
    burstiness: float = _option(1.0, "1: Poisson arrivals; lower: burstier; higher: more even; inf: evenly spaced.")
    max_concurrency: str | None = _option(
        None, "Most requests (multi_turn: conversations) at a time; 1,8,64 is a sweep."
    )
    num_warmups: int = _option(0, "Requests sent before the measurement.")
    disable_tqdm: bool = _option(False, "Show no progress bar.")

    def __post_init__(self) -> None:
        if not self.burstiness > 0:
            raise ConfigError(f"burstiness is {self.burstiness}; it must be above 0.")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups is {self.num_warmups}; it must not be negative.")
        rates, concurrencies = self.rates, self.concurrencies
        if len(rates) > 1 and len(concurrencies) > 1:
            raise ConfigError("request_rate and max_concurrency are both lists; sweep one of them at a time.")

    @property
    def rates(self) -> list[float | None]:
        """One rate per run; None is the load's own."""
        if self.request_rate is None:
            return [None]
        return [
            _number(text, "request_rate", float, "a number above 0, or inf") for text in self.request_rate.split(",")
        ]

    @property
    def concurrencies(self) -> list[int | None]:
        """One bound per run; None is no bound."""
        if self.max_concurrency is None:
            return [None]
        return [_number(text, "max_concurrency", int, "an integer above 0") for text in self.max_concurrency.split(",")]


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What is told, and where it is kept."""

    percentile_metrics: str = _option("ttft,tpot,itl,e2el", "Latencies to report: ttft, tpot, itl, e2el, norm.")
    metric_percentiles: str = _option("99", "Percentiles of each, e.g. 50,90,99.")
    goodput: list[str] | None = field(
        default=None,
        metadata={
            "help": "NAME:MILLISECONDS; counts requests within all bounds on ttft, tpot, e2el. With commas, or "
            "several times."
        },
    )
    save_result: bool = _option(False, "Write JSON; of a sweep also CSV and PNG.")
    save_detailed: bool = _option(False, "With every request's lengths, times and text in the JSON.")
    plot: bool = _option(False, "Write the distributions of the latencies as PNG.")
    result_dir: str | None = _option(None, "Directory for files.")
    result_filename: str | None = _option(None, "Name of the JSON file; the others have its stem.")
    label: str | None = _option(None, "First part of the file's name; default: the backend.")
    metadata: list[str] | None = field(
        default=None, metadata={"help": "KEY=VALUE added to the JSON; may be given several times."}
    )

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"percentile_metrics has {name!r}; use {', '.join(METRICS)}.")
        for p in self.percentiles:
            if not 0 <= p <= 100:
                raise ConfigError(f"metric_percentiles has {p:g}; percentiles are in [0, 100].")
        self.bounds()
        pairs(self.metadata, "metadata")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of latencies."""
        return tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles in [0, 100]."""
        texts = [text for text in self.metric_percentiles.split(",") if text.strip()]
        try:
            return tuple(float(text) for text in texts)
        except ValueError:
            raise ConfigError(
                f"metric_percentiles is {self.metric_percentiles!r}; give numbers such as 50,90,99."
            ) from None

    def bounds(self) -> dict[str, float]:
        """Bounds of the goodput, in seconds."""
        found: dict[str, float] = {}
        for text in (part for given in self.goodput or () for part in given.replace(",", " ").split()):
            name, _, value = text.partition(":")
            if name not in GOODPUT_METRICS:
                raise ConfigError(f"goodput has {text!r}; bound {', '.join(GOODPUT_METRICS)}, e.g. ttft:200.")
            found[name] = _number(value, "goodput", float, "milliseconds above 0, e.g. ttft:200") / 1e3
        return found


def pairs(given: Sequence[str] | None, name: str) -> dict[str, str]:
    """KEY=VALUE texts as a dict. Raises ConfigError that names the option."""
    found = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} is {text!r}; it must be KEY=VALUE.")
        found[key.strip()] = value.strip()
    return found


def _number(text: str, name: str, kind: Any, allowed: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ConfigError(f"{name} has {text.strip()!r}; it must be {allowed}.")
    return value
