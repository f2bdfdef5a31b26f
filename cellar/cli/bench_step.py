"""`cellar bench step`: one step, and what its time went into."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cellar.cli.verb import verb


@verb()
def step(
    model: Annotated[str | None, typer.Option(help="Directory, or a shipped config's name; default: the demo.")] = None,
    batch: Annotated[int, typer.Option(help="Rows that decode together.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    steps: Annotated[int, typer.Option(help="Steps measured.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt that each step computes beside decodes.")] = 0,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Time, bytes and share of the limit by kind.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Of the weights, on loading: int4, int8 or fp8.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False,
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU; default: all cores.")] = None,
    machine_profile: Annotated[
        str, typer.Option(help="Profile that chooses kernels and sets limits: auto, none, a file, or a shipped one.")
    ] = "auto",
    json: Annotated[Path | None, typer.Option(help="File for the breakdown.")] = None,
    from_json: Annotated[Path | None, typer.Option(help="Show a breakdown that was written before.")] = None,
    png: Annotated[Path | None, typer.Option(help="File for a figure of the breakdown.")] = None,
) -> None:
    """Milliseconds of a decode step with random weights; with --breakdown, where they go."""
    from cellar.bench.step.command import StepOptions, run

    run(
        StepOptions(
            model=model,
            batch=batch,
            context=context,
            steps=steps,
            prompt=prompt,
            breakdown=breakdown,
            device=device,
            dtype=dtype,
            quantization=quantization,
            eager=eager,
            num_threads=num_threads,
            machine_profile=machine_profile,
            json=json,
            from_json=from_json,
            png=png,
        )
    )
