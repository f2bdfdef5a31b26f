"""`cellar plan MODEL`: where every byte lives and how the model is split on a machine, priced before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cellar.cli.verb import verb
from cellar.core.config import CacheConfig, OffloadConfig, ScheduleConfig, step_tokens
from cellar.core.errors import ConfigError

if TYPE_CHECKING:
    from cellar.core.specs import ModelSpec
    from cellar.planner.cost import Dimensions
    from cellar.planner.machines import Machine
    from cellar.planner.offload import Job, Schedule
    from cellar.planner.partition import Formats
    from cellar.planner.saved import SavedPlan
    from cellar.planner.search import Answer

MOST_CHIPS = 1024
SCHEDULES = {"zigzag": ("zigzag",), "diagonal": ("diagonal",), "best": ("zigzag", "diagonal")}
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
    latency: Annotated[float | None, typer.Option(help="Seconds that a whole batch may take.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            help="Weights (and KV): bf16, int8, fp8, int4, int4+kv4 or float32, several with commas; default: as it "
            "runs, and the others are listed."
        ),
    ] = None,
    chips: Annotated[
        str | None,
        typer.Option(help="Numbers of devices with commas: latency against cost over all of them, no single plan."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="K and V as an engine keeps them: auto, fp8 or int4.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per chunk of KV: 16, 32 or 64.")] = 32,
    schedule: Annotated[
        str, typer.Option(help="Of blocks that are offloaded: zigzag, diagonal, or best of both.")
    ] = "zigzag",
    device_memory: Annotated[
        float | None, typer.Option(help="GiB that a device may hold; on a processor what it lacks goes elsewhere.")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of host memory; default: as the machine, or on a processor as needed.")
    ] = None,
    disk: Annotated[
        float | None, typer.Option(help="GiB of disk; default: as the machine, on a processor none.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another machine, or a plan that --output wrote, to compare with this one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the plan, which an engine runs with --plan.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots as PNG.")] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Also print every number used, with its origin.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Search placement, partition and pipeline together; print the best plan, what binds it, and the frontier."""
    import json as jsonlib
    from dataclasses import asdict

    from cellar.planner.cost import dimensions
    from cellar.planner.offload import Job
    from cellar.planner.saving import run_dtype, saved_plan
    from cellar.planner.search import find
    from cellar.reports.machines import fast_bfloat16, fitted, open_machine, open_profile
    from cellar.reports.models import model_spec
    from cellar.reports.offload import print_planned
    from cellar.reports.plan import print_answer, print_compared, save_plots
    from cellar.reports.plan_formats import asked_formats, compared, in_formats, own_formats

    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r} is unknown; use {', '.join(OBJECTIVES)}.")
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule {schedule!r} is unknown; use {', '.join(SCHEDULES)}.")
    schedules: Any = SCHEDULES[schedule]
    profile = open_profile(machine)
    here = open_machine(machine, profile)
    spec = model_spec(
        model,
        here.device.kind,
        fast_bfloat16=fast_bfloat16(profile),
        chunk_size=CacheConfig(block_size=block_size).block_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    sizes = OffloadConfig(device_memory=device_memory, host_memory=host_memory, disk=disk).nbytes
    if here.device.kind == "cpu" and sizes["device"] is not None:
        said: dict[str, Any] = {"objective": objective != "throughput", "formats": formats}
        said |= {"compare": compare, "plots": plots, "sources": sources, "json": json}
        without = [name for name, given in said.items() if given]
        if without:
            raise ConfigError(
                f"{without[0]} has no effect on a processor held to device_memory, whose weights are placed by bytes "
                f"alone; leave {without[0]} out."
            )
        found = _held(spec, sizes, Job(prompt, generate), latency, schedules, model, here)
        print_planned(found, spec)
        if output is not None:
            output.write_text(found.to_json() + "\n", encoding="utf-8")
            typer.echo(str(output))
        return
    here = here.limited(sizes)
    job, chosen_formats = Job(prompt, generate), asked_formats(formats, spec)
    if prompt + generate > spec.max_position:
        raise ConfigError(
            f"{prompt} + {generate} tokens are more than the {spec.max_position} that {model} can attend to; "
            f"ask for --prompt {max(spec.max_position - generate, 1)} or less."
        )
    d = dimensions(spec)
    if chips is not None:
        said = {"objective": objective != "throughput", "latency": latency, "schedule": schedule != "zigzag"}
        said |= {"compare": compare, "output": output, "sources": sources}
        if without := [name for name, given in said.items() if given]:
            raise ConfigError(f"{without[0]} is of one plan, and chips compares many; leave one of them out.")
        _swept(d, here, chips, job, chosen_formats, f"{model} on {machine}: {prompt} + {generate} tokens", plots, json)
        return

    def search(found: Machine, among: Sequence[Formats] = chosen_formats) -> Answer:
        return find(d, found, job, objective, latency, among, schedules)  # type: ignore[arg-type]

    # Steps are measured in the model's own formats, whatever is asked for.
    dtype = run_dtype(chosen_formats[0], spec.dtype)
    here = fitted(here, profile, d, model, own_formats(spec, dtype), dtype)[0]
    answer = search(here)
    rows = () if formats else compared(spec, answer.chosen, lambda form: search(here, (form,)).chosen)
    about = {"model": model, "prompt": prompt, "generate": generate, **answer.chosen.figures()}
    if json:
        pareto = [one.figures() for one in answer.pareto]
        listed = [asdict(row) for row in rows]
        typer.echo(jsonlib.dumps({**about, "warnings": answer.warnings, "pareto": pareto, "formats": listed}))
    else:
        title = f"{model} on {machine}: {prompt} + {generate} tokens, for {objective}"
        print_answer(answer, title, sources, rows)
    if compare is not None:
        before = _saved(Path(compare))
        other = search(open_machine(compare)).chosen.figures() if before is None else before
        print_compared(answer.chosen.figures(), other)
    if output is not None:
        written = answer.running or answer.chosen
        held = in_formats(spec, written.formats)
        saved = saved_plan(written, held, _named(model), prompt=prompt, generate=generate)
        output.write_text(saved.to_json() + "\n", encoding="utf-8")
        typer.echo(str(output), err=json)
    if plots is not None:
        for path in save_plots(answer, plots):
            typer.echo(str(path), err=json)


def _swept(
    d: Dimensions,
    machine: Machine,
    chips: str,
    job: Job,
    formats: tuple[Any, ...],
    title: str,
    plots: Path | None,
    json: bool,
) -> None:
    """Latency against cost over numbers of devices."""
    import json as jsonlib
    from dataclasses import asdict

    from cellar.planner.sweep import sweep
    from cellar.reports.sweep import print_sweep, save_sweep

    counts = [int(word) if word.isascii() and word.isdigit() else 0 for word in chips.split(",")]
    if min(counts) < 1 or max(counts) > MOST_CHIPS:
        raise ConfigError(f"chips {chips!r} must be numbers from 1 to {MOST_CHIPS:,} with commas, such as 8,16,64.")
    points = sweep(d, machine, sorted(set(counts)), job, formats)
    if json:
        typer.echo(jsonlib.dumps({"chips": [asdict(point) for point in points]}))
    else:
        print_sweep(points, title)
    if plots is not None:
        typer.echo(str(save_sweep(points, plots)), err=json)


def _held(
    spec: ModelSpec,
    sizes: Mapping[str, int | None],
    job: Job,
    latency: float | None,
    schedules: tuple[Schedule, ...],
    model: str,
    machine: Machine,
) -> SavedPlan:
    """The plan of a processor that may hold `sizes["device"]` bytes, for requests as long as those of the job: the
    better one of these schedules.
    """
    from cellar.planner.capped import Room, capped_plan
    from cellar.planner.rates import processor_rates
    from cellar.planner.saved import Limits

    if job.generate < 2:
        raise ConfigError("generate is 1, but a plan that streams weights is for decodes; ask for 2 tokens or more.")
    longest = job.prompt + job.generate
    if longest > spec.max_position:
        raise ConfigError(f"{longest} tokens are more than the {spec.max_position} that {model} can attend to.")
    if latency is not None and not 0 < latency < float("inf"):
        raise ConfigError(f"latency is {latency:g}; it must be a positive number of seconds.")
    limits = Limits(ScheduleConfig().max_num_seqs, step_tokens("cpu"), longest)
    room = Room(sizes["device"] or 0, sizes["host"], sizes["disk"] or 0)
    rates = processor_rates(machine, spec.dtype)
    named = _named(model)
    plans = [
        capped_plan(
            spec, room, limits, model=named, machine=machine.name, rates=rates, job=job, latency=latency, order=order
        )
        for order in schedules
    ]
    return max(plans, key=lambda plan: float(plan.figures["predicted"]["tokens_per_second"]))


def _named(model: str) -> str:
    """The model as an engine that starts anywhere finds it."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _saved(path: Path) -> Any:
    """The figures of a plan's file; None if it is none (a machine's name or profile)."""
    from cellar.planner.saved import read_plan

    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    return read_plan(text).figures if '"placement"' in text else None
