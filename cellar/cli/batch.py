"""`cellar batch`: a file of requests in OpenAI's batch format, done as fast as the engine can."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cellar.cli.verb import ENGINE, importing_for, verb
from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.extras import missing
from cellar.server.config import LimitConfig, ServerConfig

if TYPE_CHECKING:
    from cellar.server.batch import BatchCounts, ResultFile

# One user's file, on his own machine: nobody else has to be protected from its length.
_LIMITS = LimitConfig(
    max_request_sequences=2**62,
    max_listed_tokens=2**62,
    max_request_logprobs=2**62,
    max_queued_requests=2**62,
    max_queued_tokens=2**62,
    max_body_bytes=2**62,
    max_body_values=2**62,
)


@verb(engine=ENGINE)
def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one per line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results, one per line, appended as they finish.")],
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the requests; several separated by commas.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes tool calls, as in `cellar serve`.")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests handed to the engine at a time; default: 2 x max_num_seqs.")
    ] = None,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="Show no progress bar.")] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests in OpenAI's batch format. Run again, it resumes where it stopped.

    Exit code 0: all succeeded; 1: done, but some lines failed, now or before; 2: it could not be done.
    """
    from cellar.engine.plan import with_plan

    config, _ = with_plan(EngineConfig.of(**engine))
    server = ServerConfig(served_model_name=served_model_name, tool_call_parser=tool_call_parser)
    try:
        from cellar.server.batch import BatchCounts, ResultFile, read_requests
    except ModuleNotFoundError as error:
        raise missing("batches need", error.name, "server") from error
    total = sum(1 for _ in read_requests(requests))  # a wrong name of the input leaves no output behind
    if output.exists() and output.samefile(requests):
        raise ConfigError(f"the output is the input, {requests}; give another file.")
    counts, started = BatchCounts(), time.perf_counter()
    with ResultFile(output) as results:
        pending = sum(not results.has(line) for line in read_requests(requests))
        stopped = False
        if pending:  # else the model need not be loaded
            bar = None if disable_tqdm or not sys.stderr.isatty() else (total - pending, total)
            stopped = _answer(config, server, requests, results, max_in_flight, counts, bar, pending)
        failed_before = results.num_failed
    # Where results go to a terminal or a pipe, nothing else may.
    _tell(counts, total - pending, failed_before, time.perf_counter() - started, output, err=not results.is_file)
    if stopped:
        left = max(0, pending - counts.succeeded - counts.failed)  # the input may have grown meanwhile
        typer.echo(f"cellar: stopped with {left} left; run the same command again to go on.", err=True)
        raise typer.Exit(130)
    if counts.failed or failed_before:
        raise typer.Exit(1)


def _answer(
    config: EngineConfig,
    server: ServerConfig,
    requests: Path,
    results: ResultFile,
    max_in_flight: int | None,
    counts: BatchCounts,
    bar: tuple[int, int] | None,
    pending: int,
) -> bool:
    """Load the model and do what is left, `pending` lines; `bar` says how many of how many are done at the beginning.

    -> True if Ctrl-C ended it: the first starts no more lines and lets the running ones finish, the second drops them.
    """
    with importing_for(config.device):
        from tqdm.auto import tqdm

        from cellar.bench.forecast import Forecast
        from cellar.engine.measured_price import measured_price
        from cellar.engine.opened import open_front
        from cellar.engine.stream import AsyncLLM
        from cellar.planner.passes import predicted_rate
        from cellar.reports.forecast import predict
        from cellar.reports.offload import print_offload
        from cellar.server.app import build_app
        from cellar.server.batch import Batch
        from cellar.server.host import SameProcess, ServedModel
        from cellar.server.run import model_names

    forecast = Forecast()
    price = measured_price(config)
    opened = open_front(config, forecast.wrap)
    predict(forecast, opened, price=price)
    if opened.offloads:
        print_offload(opened.offloads, opened.plan, err=True)
    host = SameProcess(AsyncLLM.over(opened))
    app = build_app(host, ServedModel.of(opened, model_names(config, server)), server, _LIMITS)
    rate = predicted_rate(opened.plan, pending)
    beside = "" if rate is None else f" ({rate:.3g} predicted)"
    in_flight = max_in_flight or 2 * opened.config.schedule.max_num_seqs
    done, total = bar or (0, 0)
    started = time.perf_counter()

    with tqdm(total=total, initial=done, disable=bar is None, desc="Requests", dynamic_ncols=True) as shown:

        def on_result(record: Mapping[str, Any]) -> None:
            counts.note(record)
            seconds = max(time.perf_counter() - started, 1e-9)
            shares = f"in {counts.prompt_tokens / seconds:.0f} tok/s, out {counts.output_tokens / seconds:.3g} tok/s"
            shown.set_postfix_str(
                shares + beside + (f", {counts.failed} failed" if counts.failed else ""), refresh=False
            )
            shown.update(1)

        answers = Batch(app, host, config.model.seed, _sound if opened.offload is None else opened.offload.failure)
        stopped = False

        def interrupted(running: asyncio.Task[None]) -> None:
            nonlocal stopped
            stopped = True
            if answers.stop():
                tqdm.write("cellar: finishing what runs; press Ctrl-C again to drop it.", file=sys.stderr)
            else:
                running.cancel()

        async def work() -> None:
            running = asyncio.create_task(answers.run(requests, results, in_flight, on_result))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted, running)
            try:
                await running
            except asyncio.CancelledError:
                if not stopped:
                    raise
            finally:
                app.state.api.close()
                await host.close()

        asyncio.run(work())
    found = forecast.report(counts.output_tokens, time.perf_counter() - started)
    for line in found.lines() if found else ():
        typer.echo(line)
    return stopped


def _sound() -> None:
    """No disk has failed, since none is used."""


def _tell(
    counts: BatchCounts, skipped: int, failed_before: int, seconds: float, output: Path, err: bool = False
) -> None:
    before = f", {skipped} were done before" if skipped else ""
    before += f" ({failed_before} of them failed)" if failed_before else ""
    typer.echo(
        f"{counts.succeeded} succeeded, {counts.failed} failed{before}; {counts.prompt_tokens} tokens in, "
        f"{counts.output_tokens} out, {seconds:.1f} s; results in {output}",
        err=err,
    )
    for message, count in sorted(counts.errors.items(), key=lambda item: -item[1])[:3]:
        typer.echo(f"cellar: {count} failed: {message}", err=True)
