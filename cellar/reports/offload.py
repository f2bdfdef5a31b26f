"""What goes where of an offloaded model, and what is predicted, in one table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cellar.core.specs import ModelSpec
from cellar.planner.passes import predicted_line
from cellar.planner.saved import SavedPlan
from cellar.runtime.memory import human
from cellar.runtime.offload.layout import PLACES, placed_rows, planned_nbytes
from cellar.runtime.offload.opened import OffloadReport


def print_offload(reports: Sequence[OffloadReport], plan: SavedPlan | None, *, err: bool = False) -> None:
    """As it lies there on each rank, read back; the least seconds of a pass at the rates that reading back had, and
    what the plan predicts.
    """
    table = _table("What goes where, read back")
    for rank, report in enumerate(reports):
        for place in PLACES:
            rate = f"{report.rates[place] / 1e9:.3g} GB/s" if place in report.rates else ""
            moved = human(report.moved[place]) if report.moved.get(place) else ""
            seconds = f"{report.seconds[place]:.3g}" if place in report.seconds else ""
            beside = f"KV {human(report.kv)}" if place == report.kv_place else ""
            if place == "device":
                beside = f"{beside}, ring {human(report.ring)}".removeprefix(", ")
            named = f"{place} of rank {rank}" if len(reports) > 1 else place
            table.add_row(named, human(report.weights[place]), beside, moved, rate, seconds)
    console = Console(highlight=False, stderr=err)
    console.print(table)
    if limit := max(report.limit for report in reports):
        console.print(f"limit: {limit:.3g} s a pass, whatever the batch; more sequences share it.")
    if plan is not None and (said := predicted_line(plan)):
        console.print(said)
    if any(report.weights["disk"] and not report.direct for report in reports):
        console.print("the disk's directory takes no O_DIRECT: its rate is that of the page cache.")


def print_planned(plan: SavedPlan, spec: ModelSpec) -> None:
    """As planned: bytes by place, and what is predicted. What a pass moves is what is not on the device; rates are
    measured when it runs.
    """
    placement = plan.placement
    table = _table("What goes where")
    planned = planned_nbytes(placed_rows(placement, spec, plan.device))
    for place, nbytes in planned.items():
        kv = f"KV {human(placement.num_chunks * spec.kv.chunk_nbytes())}" if place == placement.kv_device else ""
        table.add_row(place, human(nbytes), kv, "" if place == "device" or not nbytes else human(nbytes), "", "")
    console = Console(highlight=False)
    console.print(table)
    console.print(predicted_line(plan))


def _table(title: str) -> Table:
    return Table("place", "weights", "beside", "a pass moves", "rate", "s a pass", title=title, title_justify="left")
