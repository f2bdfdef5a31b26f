"""What a step's collectives send in a layout, kind by kind: what each chip must, and what ranks' algorithms take in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cellar.core.layouts import Layout
from cellar.core.sums import moved_by_all_reduce
from cellar.planner.cost import Dimensions
from cellar.planner.layouts import Move, block_program, embed_program, head_program
from cellar.planner.partition import SUM_BYTES
from cellar.planner.sharding import Kind, volume


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one kind of collective over some axes. `logical`: that a chip must send; `moved`: that a rank gets."""

    kind: str
    axes: str
    logical: int
    moved: int


@dataclass(frozen=True, slots=True)
class StepSizes:
    """A step of `batch` sequences of `new` tokens, of each of which one is sampled, and bytes of an element.

    `words`: the width of the table's rows, if it is not E. `norm_last`: a block norms what it leaves.
    """

    batch: int
    new: int
    item: int = 2
    weight_bytes: float = 2.0
    words: int | None = None
    norm_last: bool = False
    sampled: int = 1


def step_traffic(d: Dimensions, layout: Layout, step: StepSizes) -> tuple[Traffic, ...]:
    """Of table, blocks and head, in a step that is not cut into chunks; heads of `d` are padded already."""
    mesh = layout.mesh
    sizes = {"B": step.batch, "L": step.new, "S": 0, "E": d.embed, "F": d.mlp, "G": 2 if d.gated else 1, "H": d.heads}
    sizes |= {"K": d.kv_heads, "D": d.head_dim, "N": d.norm_sums, "V": -(-d.vocab // mesh.size) * mesh.size}
    sizes["W"] = d.embed if step.words is None else step.words
    found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(moves: Iterable[Move], times: int, tokens: int) -> None:
        exact = {name: float(size) for name, size in (sizes | {"L": tokens}).items()}
        for move in moves:
            elements = volume(move.kind, move.before, move.after, move.axes, exact, mesh)
            if not elements:
                continue
            item = SUM_BYTES if move.name == "sums" else step.weight_bytes if move.weight else step.item
            logical = moved = times * round(elements * item)
            if move.kind is Kind.ALL_REDUCE:
                nbytes = round(move.before.local(exact, mesh) * item)
                moved = times * moved_by_all_reduce(nbytes, int(item), mesh.count(move.axes))
            key = move.kind.value, move.axes
            before = found.get(key, (0, 0))
            found[key] = before[0] + logical, before[1] + moved

    add(embed_program(layout, "E" if step.words is None else "W", step.norm_last).moves(), 1, step.new)
    add(block_program(layout, d.kv_heads, d.parallel).moves(), d.layers, step.new)
    add(head_program(layout, step.norm_last).moves(), 1, step.sampled)
    return tuple(Traffic(kind, axes, *both) for (kind, axes), both in found.items())
