"""`cellar simulate MODEL`: a load served by the real scheduler and KV store on a machine that is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from cellar.bench.serve.options import DatasetOptions, ResultOptions, TrafficOptions
from cellar.cli.verb import OptionGroup, verb
from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.core.extras import missing
from cellar.simulate.options import RoutingOptions

Part = TypeVar("Part", CacheConfig, ScheduleConfig)

_DATASET = OptionGroup(
    "Dataset",
    (DatasetOptions,),
    defaults={"num_prompts": 500, "think_time": 60.0},
    skip=frozenset({"dataset_name", "vocab_size", "max_context_len"}),
)
_TRAFFIC = OptionGroup("Traffic", (TrafficOptions,), skip=frozenset({"num_warmups", "disable_tqdm"}))
_ENGINE = OptionGroup("Engine", (CacheConfig, ScheduleConfig))
_ROUTING = OptionGroup("Routing", (RoutingOptions,))
_RESULTS = OptionGroup(
    "Results",
    (ResultOptions,),
    skip=frozenset(
        {"save_result", "save_detailed", "plot", "result_dir", "result_filename", "label", "metadata"},
    ),
)

_GROUPS = (_DATASET, _TRAFFIC, _ENGINE, _ROUTING, _RESULTS)


@verb(dataset=_DATASET, traffic=_TRAFFIC, engine=_ENGINE, routing=_ROUTING, results=_RESULTS)
def simulate(
    model: Annotated[str, typer.Argument(help="Directory, config.json, demo, or a name such as opt-13b.")] = "demo",
    machine: Annotated[
        str, typer.Option(help="t4, a100, h100, h200 or laptop, a count of one (4xA100), or a profile's JSON.")
    ] = "h200",
    weights: Annotated[
        str | None,
        typer.Option(
            help="bf16, int8, int4 or float32; default: what the run of --check had, else what an engine would choose."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus output; default: the model's.")
    ] = None,
    host_seconds: Annotated[
        float, typer.Option(min=0.0, help="What one turn of the loop costs the host, in seconds.")
    ] = 150e-6,
    max_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Send no turn later than this many seconds after the first.")
    ] = None,
    dataset_name: Annotated[
        Literal["chat", "random", "sharegpt", "prefix", "trace"],
        typer.Option(
            help="chat: conversations as Pensieve counted ShareGPT's; random: random lengths; sharegpt: real lengths; "
            "prefix: shared prefixes; trace: a replay.",
            rich_help_panel="Dataset",
        ),
    ] = "chat",
    check: Annotated[
        Path | None,
        typer.Option(help="JSON of a real run, of bench serve --save-detailed or bench offline, to compare with."),
    ] = None,
    input_len: Annotated[str, typer.Option(help="check of bench offline: the run's --input-len.")] = "16-512",
    output_len: Annotated[str, typer.Option(help="check of bench offline: the run's --output-len.")] = "16-256",
    output: Annotated[Path | None, typer.Option(help="File for the reports and every request, as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots as PNG.")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the figures of Pensieve's evaluation, simulated (ten minutes); with dataset_name trace: "
            "for what each policy finds of its prompts. They set all else."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only the last line: JSON.")] = False,
    *,
    dataset: dict[str, Any],
    traffic: dict[str, Any],
    engine: dict[str, Any],
    routing: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Latency and throughput of a model on a machine under a load, from the real scheduler on the planner's clock."""
    if figures is not None:
        alone = {
            "model": model,
            "machine": machine,
            "weights": weights,
            "check": check,
            "output": output,
            "plots": plots,
        }
        given = {name: value for name, value in alone.items() if value not in (None, "demo", "h200")}
        path = dataset.pop("dataset_path")
        options = {**given, **dataset, **traffic, **engine, **routing, **results}
        _write_figures(figures, dataset_name, path, options, typer.echo)
        return
    chat = dataset_name == "chat"
    if chat and dataset["dataset_path"] is not None:
        raise ConfigError(
            "dataset chat is generated, not read; leave dataset_path out, or use dataset sharegpt or trace."
        )
    if chat:
        dataset |= {"multi_turn": True}
    try:
        from cellar.reports.simulate import Settings, run_simulations
    except ModuleNotFoundError as error:
        raise missing("simulations need", error.name, "bench") from error

    settings = Settings(
        model=model,
        machine=machine,
        weights=weights,
        max_model_len=max_model_len,
        host_seconds=host_seconds,
        max_seconds=max_seconds,
        chat=chat,
        dataset=DatasetOptions(**dataset, dataset_name="random" if dataset_name == "chat" else dataset_name),
        traffic=TrafficOptions(**traffic),
        cache=_part(CacheConfig, engine),
        schedule=_part(ScheduleConfig, engine),
        results=ResultOptions(**results),
        routing=RoutingOptions(**routing),
        check=check,
        lengths=(input_len, output_len),
        output=output,
        plots=plots,
    )
    lines: list[str] = []
    run_simulations(settings, lines.append if json else typer.echo)
    if json:
        typer.echo(lines[-1])


def _write_figures(
    folder: Path, dataset_name: str, path: str | None, options: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Figures have a setting of their own: options that would change it are refused."""
    defaults = {p.name: p.default for group in _GROUPS for p in group.parameters()}
    given = [name for name, value in options.items() if value != defaults.get(name)]
    if given or dataset_name not in ("chat", "trace"):
        raise ConfigError(
            f"figures come with their own models, machine and load, so {given[0] if given else 'dataset_name'} has no "
            "effect; leave it out. A trace may be given by --dataset-name trace --dataset-path FILE."
        )
    if dataset_name == "trace":
        if path is None:
            raise ConfigError("dataset trace is read from a file; give its dataset_path.")
        from cellar.reports.trace_figures import write_trace_figure

        write_trace_figure(Path(path), folder, say)
        return
    if path is not None:
        raise ConfigError("the conversations of the figures are generated, not read; leave dataset_path out.")
    from cellar.reports.pensieve_figures import write_figures

    write_figures(folder, say)


def _part(kind: type[Part], options: dict[str, Any]) -> Part:
    """A dataclass from those of some options that are its fields."""
    return kind(**{name: value for name, value in options.items() if name in kind.__dataclass_fields__})
