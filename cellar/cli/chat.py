"""`cellar chat`: a conversation in the terminal."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cellar.cli.kept import KeptTalk
from cellar.cli.verb import ALONE, SAMPLING, importing_for, sampling_params, verb
from cellar.cli.wrap import WordWrap
from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError

if TYPE_CHECKING:
    from cellar.core.sampling import SamplingParams
    from cellar.engine.llm import LLM

Messages = list[dict[str, Any]]

_HELP = """/help   this list
/reset  forget the conversation
/exit   leave (or Ctrl-D)
Ctrl-C ends an answer."""

# One answer, and its text alone, is shown.
_SAMPLING = replace(SAMPLING, skip=SAMPLING.skip | {"n", "logprobs"})


@verb(engine=ALONE, sampling=_SAMPLING)
def chat(
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    conversation: Annotated[
        str | None, typer.Option(help="Go on with the kept conversation of this name or id, or begin it.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Directory of kept conversations; default: $XDG_DATA_HOME/cellar.")
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation."""
    sampling_params(sampling)  # wrong ones are found before the model is read
    with importing_for(EngineConfig.of(**engine).device):
        from cellar.engine.llm import LLM

    head: Messages = [] if system is None else [{"role": "system", "content": system}]
    with ExitStack() as stack:
        kept = None if conversation is None else stack.enter_context(closing(KeptTalk(conversation, data_dir)))
        llm = stack.enter_context(LLM(**engine))
        params = sampling_params(sampling, llm.generation.sampling)
        typer.echo(f"{_name(engine)}. /help lists the commands.")
        messages = [*head, *(kept.messages() if kept is not None else ())]
        if len(messages) > len(head):
            typer.echo(f"({conversation} goes on: {len(messages) - len(head)} messages)")
        while (line := _ask()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/help":
                    typer.echo(_HELP)
                case "/reset":
                    messages = list(head)
                    if kept is not None:
                        kept.reset()
                    typer.echo("(forgotten)")
                case command if command.startswith("/") and command[1:].isalpha():
                    typer.echo(f"There is no {command}. /help lists the commands.")
                case _:
                    before, messages = messages, _turn(llm, messages, line, params)
                    if kept is not None and messages is not before:
                        kept.add(line, messages[-1]["content"])


def _name(engine: dict[str, Any]) -> str:
    """What the model is called."""
    model = engine.get("model")
    return "The demo model" if model is None else str(model)


def _ask() -> str | None:
    """The next line of the user; None at the end of input."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (arrow keys and history of `input`)
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _turn(llm: LLM, messages: Messages, line: str, params: SamplingParams) -> Messages:
    """One question and its answer; the conversation with both, or as it was if there is no answer."""
    asked: Messages = [*messages, {"role": "user", "content": line}]
    text, answer = "", None
    shown = WordWrap(sys.stdout.write, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    try:
        for answer in llm.stream_chat(asked, params):
            new = answer.outputs[0].text
            shown.push(new[len(text) :])
            sys.stdout.flush()
            text = new
        shown.flush()
    except RequestError as error:
        typer.echo(f"cellar: {error} /reset starts afresh.", err=True)
        return messages
    except KeyboardInterrupt:
        shown.flush()
        typer.echo(" ...")
    else:
        typer.echo()
        if answer is not None and answer.outputs[0].finish_reason == "error":
            typer.echo(f"cellar: {answer.outputs[0].stop_reason}", err=True)
            return messages
    return [*asked, {"role": "assistant", "content": text}]
