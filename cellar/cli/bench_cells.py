"""`cellar bench cells`: recurrent models under load, beside padding, merging and the ideal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cellar.cli.verb import verb


@verb()
def cells(
    model: Annotated[Literal["lstm", "seq2seq", "treelstm"], typer.Option(help="Which model.")] = "lstm",
    hidden: Annotated[int, typer.Option(min=1, help="Width of states.")] = 256,
    vocab: Annotated[int | None, typer.Option(min=3, help="Words; default: 30,000 at h = 1024, in proportion.")] = None,
    data: Annotated[
        str | None, typer.Option(help="wmt, wmt-50, fixed-24, treebank, fixed-16, or a file of sentences or trees.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or a device's name.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU; default: all cores.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Largest batch; default: by device and model.")] = None,
    decoder_batch: Annotated[int | None, typer.Option(min=1, help="Largest batch of decoder cells.")] = None,
    tree_batch: Annotated[
        int | None, typer.Option(min=1, help="Most nodes of a task of our trees' cells; default: by device.")
    ] = None,
    max_tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Tasks of a decision; default: 5 on a CPU and where chains grow, else 16."),
    ] = None,
    run_ahead: Annotated[
        int | None, typer.Option(min=1, help="Decisions on their way to the device; default: 1 on a CPU, else 2.")
    ] = None,
    answer_tasks: Annotated[int, typer.Option(min=1, help="Tasks whose results a GPU gives at once.")] = 16,
    ahead: Annotated[bool, typer.Option("--ahead", help="Unfold all requests before the clock starts.")] = False,
    systems: Annotated[
        str, typer.Option(help="cellar first, then merging, padding-10, library-10, ideal; default: all that fit.")
    ] = "",
    load: Annotated[Literal["sweep", "max"], typer.Option(help="Rising loads, or everything at once.")] = "sweep",
    rates: Annotated[str, typer.Option(help="Requests/s with commas between; default: from what saturates.")] = "",
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a run.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each comparison.")] = 3,
    refinements: Annotated[int, typer.Option(min=0, help="Steps of the search for each peak.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a saturated run.")] = 2000,
    clock: Annotated[
        Literal["wall", "work"], typer.Option(help="wall, or work: CPU time of one thread per system, waits skipped.")
    ] = "wall",
    seed: Annotated[int, typer.Option(help="Seed of weights, data and arrivals.")] = 0,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    png: Annotated[Path | None, typer.Option(help="File for the curves.")] = None,
) -> None:
    """Latency against throughput of recurrent models: cellular batching, padding, merging, ideal."""
    from cellar.bench.cells.run import CellsOptions, parse_rates, run
    from cellar.bench.cells.setup import Setup
    from cellar.bench.cells.sweep import Schedule

    run(
        CellsOptions(
            setup=Setup(
                model=model,
                hidden=hidden,
                vocab=vocab,
                data=data,
                device=device,
                dtype=dtype,
                threads=num_threads,
                max_batch=max_batch,
                decoder_batch=decoder_batch,
                tree_batch=tree_batch,
                max_tasks=max_tasks,
                run_ahead=run_ahead,
                answer_tasks=answer_tasks,
                ahead=ahead,
                clock=clock,
                seed=seed,
            ),
            schedule=Schedule(
                seconds=seconds,
                rounds=rounds,
                rates=parse_rates(rates),
                refinements=refinements,
                saturating_requests=requests,
                seed=seed,
            ),
            systems=tuple(filter(None, systems.split(","))),
            load=load,
            json=json,
            png=png,
        ),
        say=typer.echo,
    )
