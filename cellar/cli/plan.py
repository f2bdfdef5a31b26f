"""`cellar plan MODEL`: where every byte lives and how the model is split on a machine, priced before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cellar.cli.verb import verb
from cellar.core.errors import ConfigError

OBJECTIVES = ("throughput", "latency", "cost")


@verb()
def plan(
    model: Annotated[
        str, typer.Argument(help="Directory, config.json, demo, or a name such as llama-3-70b or palm-540b.")
    ] = "demo",
    machine: Annotated[
        str, typer.Option(help="t4, a100, h100, h200, tpuv4 or laptop, a count of one (4xH200), or a profile's JSON.")
    ] = "h200",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    generate: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 32,
    objective: Annotated[str, typer.Option(help="throughput, latency or cost.")] = "throughput",
    max_latency: Annotated[float | None, typer.Option(help="Seconds that a whole batch may take.")] = None,
    formats: Annotated[
        str, typer.Option(help="Weights (and KV) as bf16, int8, int4 or int4+kv4; several by comma.")
    ] = "bf16",
    diagonal: Annotated[bool, typer.Option("--diagonal", help="Consider the diagonal block schedule too.")] = False,
    compare: Annotated[
        str | None, typer.Option(help="Another machine, or a plan that --output wrote, to put beside this one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for the plan and its Placement as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots as PNG.")] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Also print every number used, with its origin.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Search placement, partition and pipeline together; print the best plan, what binds it, and the frontier."""
    import json as jsonlib

    from cellar.bench.plan import model_spec, open_machine, print_answer, print_compared, save_plots
    from cellar.planner.cost import dimensions
    from cellar.planner.offload import Job
    from cellar.planner.placement import placement, to_json
    from cellar.planner.report import figures
    from cellar.planner.search import find

    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r} is unknown; use {', '.join(OBJECTIVES)}.")
    chosen_formats = _formats(formats)
    spec, job = model_spec(model), Job(prompt, generate)
    if prompt + generate > spec.max_position:
        raise ConfigError(
            f"{prompt} + {generate} tokens are more than the {spec.max_position} that {model} can attend to; "
            f"ask for --prompt {max(spec.max_position - generate, 1)} or less."
        )
    d = dimensions(spec)
    schedules: Any = ("zigzag", "diagonal") if diagonal else ("zigzag",)

    def search(name: str) -> Any:
        return find(d, open_machine(name), job, objective, max_latency, chosen_formats, schedules)  # type: ignore[arg-type]

    answer = search(machine)
    about = {"model": model, "prompt": prompt, "generate": generate, **figures(answer.chosen)}
    if json:
        pareto = [figures(one) for one in answer.pareto]
        typer.echo(jsonlib.dumps({**about, "warnings": answer.warnings, "pareto": pareto}))
    else:
        title = f"{model} on {machine}: {prompt} + {generate} tokens, for {objective}"
        print_answer(answer, title, sources)
    if compare is not None:
        saved = _saved(Path(compare))
        other = figures(search(compare).chosen) if saved is None else saved
        print_compared(figures(answer.chosen), other)
    if output is not None:
        output.write_text(to_json(placement(answer.chosen, spec), **about) + "\n", encoding="utf-8")
        typer.echo(str(output), err=json)
    if plots is not None:
        for path in save_plots(answer, plots):
            typer.echo(str(path), err=json)


def _formats(names: str) -> tuple[Any, ...]:
    from cellar.planner.partition import BF16, INT4, INT4_KV4, INT8

    known = {form.name: form for form in (BF16, INT8, INT4, INT4_KV4)}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ConfigError(f"format {unknown[0]!r} is unknown; use {', '.join(known)}.")
    return tuple(known[name] for name in names.split(","))


def _saved(path: Path) -> Any:
    """The figures of a plan's file; None if it is none (a machine's name or profile)."""
    from cellar.planner.placement import read_plan

    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    return read_plan(text) if '"placement"' in text else None
