"""The same batch offline and over HTTP: what the server costs.

    python -m benchmarks.http_offline --model llama-3-8b --dtype bfloat16

generates for random prompts of token ids through `LLM.generate`, then starts `cellar serve` with the same options and
sends as many by `cellar bench serve` all at once. Printed are the ratio of generated tokens per second, each side the
better of `--rounds` runs, and the two commands, to be run by hand. Every run has other prompts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cellar.bench.offline import Bench
from cellar.bench.workload import LengthRange
from cellar.core.errors import CellarError, RequestError

WANTED = 0.9
_READY_SECONDS = 300
_STOP_SECONDS = 30


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_offline", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="name of a shipped config, or a directory")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        found = compare(options)
    except CellarError as error:
        sys.exit(f"cellar: {error}")
    print(
        f"over HTTP {max(found['http']):.0f} tok/s, offline {max(found['offline']):.0f}: ratio {found['ratio']:.3f} "
        f"(at least {WANTED} wanted)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides one after the other, as JSON has them; rates are generated tokens per second of each run."""
    engine = {
        "load_format": options.load_format,
        "skip_tokenizer_init": True,
        "device": options.device,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "enable_prefix_caching": False,
    }
    offline, vocab_size = _offline(options, engine)
    port = _free_port()
    serve = [*_CELLAR, "serve", options.model, "--port", str(port), *_flags(engine), "--log-level", "warning"]
    load = [*_CELLAR, "bench", "serve", "--port", str(port), "--num-prompts", str(options.num_prompts)]
    load += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    load += ["--vocab-size", str(vocab_size), "--ignore-eos", "--request-rate", ",".join(["inf"] * options.rounds)]
    # Without a tokenizer there is no text; ids are what makes an event of each token.
    load += ["--extra-body", '{"return_token_ids": true}']
    load += ["--ready-check-timeout-sec", str(_READY_SECONDS), "--disable-tqdm"]
    commands = [shlex.join(["cellar", *command[len(_CELLAR) :]]) for command in (serve, load)]
    print("\n".join(f"$ {command}" for command in commands), flush=True)
    with _running(serve, port):
        reports = _loaded(load)
    failed = sum(report["failed"] for report in reports)
    if failed:
        raise RequestError(f"{failed} requests failed; run the printed commands by hand to see why.")
    made = options.num_prompts * options.output_len
    for report in reports:
        if report["total_output_tokens"] != made:
            raise RequestError(f"{report['total_output_tokens']} tokens came over HTTP, but {made} were asked for.")
    http = [report["output_throughput"] for report in reports]
    return {
        "model": options.model,
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "offline": offline,
        "http": http,
        "ratio": max(http) / max(offline),
        "median_ttft_ms": [report["median_ttft_ms"] for report in reports],
        "median_itl_ms": [report["median_itl_ms"] for report in reports],
        "commands": commands,
    }


_CELLAR = (sys.executable, "-m", "cellar")


def _offline(options: argparse.Namespace, engine: dict[str, Any]) -> tuple[list[float], int]:
    """Rates of the runs, and the size of the vocabulary."""
    bench = Bench({"model": options.model, **engine})
    try:
        lengths = LengthRange(options.input_len, options.input_len), LengthRange(options.output_len, options.output_len)
        bench.run(bench.workload(2, LengthRange(8, 8), LengthRange(4, 4), seed=options.rounds))
        rates = []
        for seed in range(options.rounds):
            work = bench.workload(options.num_prompts, *lengths, seed=seed)
            rates.append(work.num_output_tokens / bench.run(work))
            print(f"offline: {rates[-1]:.0f} tok/s", flush=True)
        return rates, bench.llm.spec.vocab_size
    finally:
        bench.close()


def _loaded(command: Sequence[str]) -> list[dict[str, Any]]:
    """Run the load; -> its reports. Its table goes to this program's output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise RequestError(f"`cellar bench serve` ended with status {done.returncode}; its message stands above.")
    last = json.loads(done.stdout.splitlines()[-1])
    return last if isinstance(last, list) else [last]


@contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[None]:
    """A server that is ready, and afterwards drained and gone; what it logged is shown if it ended by itself."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(server, port)
            yield
        finally:
            if server.poll() is not None:
                log.seek(0)
                print(log.read(), file=sys.stderr)
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Raises RequestError as soon as the server has ended, or if it takes too long."""
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RequestError(f"`cellar serve` ended with status {server.returncode}; its log stands above.")
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.2)
    raise RequestError(f"`cellar serve` was not ready after {_READY_SECONDS} s; run the printed command by hand.")


def _flags(engine: dict[str, Any]) -> list[str]:
    found = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
