"""`cellar inspect MODEL`: what a model is, what it costs, and what fits in this machine's memory."""

from __future__ import annotations

from typing import Annotated

import typer

from cellar.cli.verb import verb


@verb()
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory, hub name, or a shipped config such as llama-3-8b; default: the demo model."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Context to count with; default: the model's.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8 or int4.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Architecture, parameters, bytes, FLOPs per token, and what fits here. Reads no weights."""
    from cellar.reports.inspect import dissect, print_anatomy

    anatomy = dissect(model, dtype, max_model_len, kv_cache_dtype)
    if json:
        typer.echo(anatomy.to_json())
    else:
        print_anatomy(anatomy)
