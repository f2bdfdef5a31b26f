"""`cellar generate`: text from prompts; live for one prompt, a progress bar for many."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cellar.cli.verb import ALONE, SAMPLING, importing_for, sampling_params, verb
from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError

if TYPE_CHECKING:
    from cellar.core.messages import RequestOutput, TokenLogprob
    from cellar.core.sampling import SamplingParams
    from cellar.engine.llm import LLM

STORY = "Once upon a time"


@verb(engine=ALONE, sampling=SAMPLING)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; - reads one per line from standard input. None: a story.")
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="File of prompts: one per line, or JSON lines if it is named *.jsonl."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write results as JSON lines to this file.")
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue prompts. One prompt is shown as it is written, with figures at the end."""
    params = sampling_params(sampling)  # wrong ones are found before the model is read
    texts = _prompts(prompts, input)
    if output is not None:
        _check_writable(output)
    config = EngineConfig.of(**engine)
    with importing_for(config.device):
        from cellar.bench.forecast import Forecast
        from cellar.engine.llm import LLM
        from cellar.engine.opened import open_front
        from cellar.reports.offload import print_offload

    forecast = Forecast()
    opened = open_front(config, forecast.wrap)
    with LLM.over(opened) as llm:
        if opened.memory is not None and sys.stderr.isatty():
            typer.echo(opened.memory.line(), err=True)
        if opened.offloads:
            print_offload(opened.offloads, opened.plan, err=True)
        if llm.plan is not None:
            forecast.follow(llm.plan, None if llm.offload is None else llm.offload.channels.seconds)
        params = sampling_params(sampling, llm.generation.sampling)
        started = time.perf_counter()
        if len(texts) == 1 and params.n == 1 and output is None:
            count, results = _live(llm, texts[0], params), []
        else:
            results = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
            count = sum(len(completion.token_ids) for result in results for completion in result.outputs)
        found = forecast.report(count, time.perf_counter() - started)
        if output is not None:
            with output.open("w", encoding="utf-8") as file:
                _write(results, file)
            typer.echo(f"{len(results)} results in {output}")
        elif results:
            _show(results)
        for line in found.lines() if found else ():
            typer.echo(line)
    failed = [result for result in results if result.outputs[0].finish_reason == "error"]
    if failed:
        raise RequestError(
            f"{len(failed)} of {len(results)} requests failed; the first: {failed[0].outputs[0].stop_reason}"
        )


def _prompts(arguments: list[str] | None, file: Path | None) -> list[Any]:
    """Prompts of all sources, in the order given."""
    found: list[Any] = []
    for argument in arguments or ():
        found.extend(_lines(sys.stdin) if argument == "-" else [argument])
    if file is not None:
        try:
            with file.open(encoding="utf-8") as stream:
                found.extend(_json_lines(stream, file) if file.suffix == ".jsonl" else _lines(stream))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the prompts in {file} cannot be read ({error}); give a UTF-8 text file.") from error
    if not found and (arguments or file):
        raise RequestError("there are no prompts in the input; give at least one line.")
    return found or [STORY]


def _check_writable(file: Path) -> None:
    """Found out before the work, not behind it. Raises RequestError."""
    try:
        file.open("a").close()
    except OSError as error:
        raise RequestError(f"results cannot be written to {file} ({error.strerror}); give another file.") from error


def _lines(stream: TextIO) -> list[str]:
    return [line.rstrip("\r\n") for line in stream if line.strip()]


def _json_lines(stream: TextIO, file: Path) -> list[Any]:
    found = []
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise RequestError(f"line {number} of {file} is not JSON ({error}); write one prompt per line.") from error
    return found


def _live(llm: LLM, prompt: Any, params: SamplingParams) -> int:
    """Write tokens as they come; the last line has the figures. Returns how many there were."""
    started = first = time.perf_counter()
    count, shown = 0, 0
    answer: RequestOutput | None = None
    for answer in llm.stream(prompt, params):
        completion = answer.outputs[0]
        if count == 0:
            first = time.perf_counter()
            sys.stdout.write(answer.prompt or "")
        count = len(completion.token_ids)
        if llm.has_tokenizer:
            sys.stdout.write(completion.text[shown:])
            shown = len(completion.text)
        else:
            sys.stdout.write("".join(f"{token} " for token in completion.token_ids[shown:]))
            shown = count
        sys.stdout.flush()
    seconds = time.perf_counter() - started
    typer.echo("\n")
    if answer is None or answer.outputs[0].finish_reason == "error":
        raise RequestError(str(answer.outputs[0].stop_reason if answer else "the request was dropped."))
    decode = seconds - (first - started)
    rate = (count - 1) / decode if count > 1 and decode > 0 else count / seconds
    typer.echo(
        f"{count} tokens in {seconds:.2f} s: {rate:.1f} tok/s, first token after {(first - started) * 1e3:.0f} ms, "
        f"{len(answer.prompt_token_ids)} prompt tokens, ended by {answer.outputs[0].finish_reason}"
    )
    return count


def _show(results: list[RequestOutput]) -> None:
    from rich.console import Console
    from rich.rule import Rule

    console = Console(highlight=False)
    for k, result in enumerate(results):
        for completion in result.outputs:
            title = f"{k + 1}" if len(result.outputs) == 1 else f"{k + 1}.{completion.index + 1}"
            console.print(Rule(title, align="left", style="dim"))
            text = (result.prompt or "") + completion.text or str(completion.token_ids)
            console.out(text)


def _write(results: list[RequestOutput], file: TextIO) -> None:
    for result in results:
        file.write(json.dumps(_plain(result), ensure_ascii=False) + "\n")


def _plain(result: RequestOutput) -> Mapping[str, Any]:
    """A result as JSON: its dataclass, with token ids and log-probabilities as lists."""
    found = asdict(replace(result, prompt_logprobs=None, outputs=[replace(o, logprobs=None) for o in result.outputs]))
    for made, output in zip(found["outputs"], result.outputs, strict=True):
        made["logprobs"] = _tables(output.logprobs)
    return {
        **found,
        "prompt_token_ids": [int(token) for token in result.prompt_token_ids],
        "prompt_logprobs": _tables(result.prompt_logprobs),
    }


def _tables(tables: Sequence[Mapping[int, TokenLogprob] | None] | None) -> list[Any] | None:
    if tables is None:
        return None
    return [None if table is None else {token: asdict(one) for token, one in table.items()} for table in tables]
