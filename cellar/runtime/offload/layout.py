"""What a placement means to the byte, as data: which rows of which tensor lie where, and what a layer's slot holds.

    device:  [rows of tensor a] [rows of tensor b] ...      each in a place of its own
    host:    layer j: [rows of a][vectors][rows of c]       one record a layer, rows that the CPU may multiply last
             [a table]                                      whole, of which the device reads rows over the link
    disk:    layer j: [rows of a][rows of b][vectors]       one record a layer, at a multiple of 4 KiB
    slot:    [record of the disk, whole pages]              as it is, so that reads may go straight here
             [rows from host ...]                           as they are, so that one copy moves them
             [vectors of which anything is away, whole]     rows of the device included
             [rows that the CPU may multiply]               where it is the device, slots end before them

Runs of rows begin at multiples of 64 bytes, in records as in slots. Each is a piece (`core/pieces.py`): plain numbers,
or quantized ones in their bits, in the order of whoever multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cellar.core.errors import ConfigError
from cellar.core.messages import Placement
from cellar.core.pieces import ALIGNMENT, Run, format_name, piece_nbytes, pieces
from cellar.core.specs import LayerSpec, ModelSpec

PLACES = ("device", "host", "disk")
PAGE = 4096
"""Of records on disk, and of slots: what reads past the page cache begin at and are multiples of."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows [start, stop) of one `run` of a tensor lie in `place`, in `nbytes`, as a `kind` (cpu, gpu) reads them.
    `by_cpu`: the CPU may multiply them there.
    """

    place: str
    start: int
    stop: int
    run: Run
    nbytes: int
    kind: str
    by_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """`rows` of a tensor stand in a slot from byte `offset` on; of a vector, all of them. `source`: rows that the CPU
    may multiply, where they stand in the record in host memory.
    """

    tensor: str
    rows: PlacedRows
    offset: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """`nbytes` of rows [start, ...) of a tensor go from byte `source` of the layer's record in `place` to byte `target`
    of the slot. Rows of the device have no record: `source` is 0.
    """

    place: str
    tensor: str
    start: int
    source: int
    target: int
    nbytes: int
    by_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """`nbytes` from byte `source` of the layer's record in `place` to byte `target` of the slot. `by_cpu`: of rows that
    the CPU may multiply instead.
    """

    place: str
    source: int
    target: int
    nbytes: int
    by_cpu: bool = False


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A layer's rows by tensor, and its slot. `record_nbytes[place]`: what host and disk keep of it. `copies` are the
    moves from there, as few as they can be. `left_nbytes`: of the slot, where rows are left to the CPU in all passes.
    """

    index: int
    rows: Mapping[str, tuple[PlacedRows, ...]]
    areas: tuple[Area, ...]
    moves: tuple[Move, ...]
    copies: tuple[Copy, ...]
    slot_nbytes: int
    left_nbytes: int
    record_nbytes: Mapping[str, int]


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def placed_rows(placement: Placement, spec: ModelSpec, kind: str = "cpu") -> dict[str, tuple[PlacedRows, ...]]:
    """Where the rows of each tensor lie, by its name in `ModelSpec.named_tensors`, ascending; what a placement has in
    one part is cut where formats differ. `kind` of device: cpu or gpu.

    Raises ConfigError unless every row of every tensor of the model is placed once, in its own format, in a place that
    there is, no group of rows cut, with the head on the device, and each table whole there or in host memory.
    """
    tensors, tables = dict(spec.named_tensors()), {table.name for table in spec.tables}
    found: dict[str, list[PlacedRows]] = {name: [] for name in tensors}
    for part in placement.weights:
        if part.tensor not in tensors:
            raise ConfigError(f"the plan places {part.tensor}, which this model does not have; plan this model again.")
        if part.device not in PLACES:
            raise ConfigError(f"the plan places {part.tensor} on {part.device}; places are {', '.join(PLACES)}.")
        tensor = tensors[part.tensor]
        if part.format != format_name(tensor):
            raise ConfigError(
                f"the plan has {part.tensor} in {part.format}, but the model has it in {format_name(tensor)}; plan "
                "again with the dtype and the quantization that it runs in."
            )
        is_table = part.device == "host" and part.tensor in tables
        if part.device != "device" and not part.tensor.startswith("layers.") and not is_table:
            raise ConfigError(
                f"the plan places {part.tensor} on {part.device}, but the head stays on the device yet, and a table "
                "there or in host memory; plan with more device_memory."
            )
        if is_table and part.stop - part.start != tensor.shape[0]:
            raise ConfigError(
                f"the plan cuts {part.tensor} at rows {part.start} and {part.stop}, but a table lies in one place; "
                "plan this model again."
            )
        by_cpu = part.compute == "host"
        is_matrix = len(tensor.shape) > 1 and not is_table
        if part.compute not in ("device", "host") or (by_cpu and not (part.device == "host" and is_matrix)):
            raise ConfigError(
                f"the plan has {part.tensor} on {part.device} multiplied by {part.compute}, but beside the device the "
                "host alone multiplies, and rows of matrices in its own memory alone; plan this model again."
            )
        for run, start, stop in pieces(tensor, part.start, part.stop):
            if run.cut_at_most(start) != start or run.cut_at_most(stop) != stop:
                raise ConfigError(
                    f"the plan cuts {part.tensor} at rows {start} and {stop}, but {run.format.rows} rows from "
                    f"{run.start} on share scales; plan this model again."
                )
            by = "cpu" if by_cpu else kind
            nbytes = piece_nbytes(tensor, run, start, stop, by)
            found[part.tensor].append(PlacedRows(part.device, start, stop, run, nbytes, by, by_cpu))
    for name, rows in found.items():
        rows.sort(key=lambda r: r.start)
        last = 0
        for placed in rows:
            if placed.start != last:
                what = "twice" if placed.start < last else "nowhere"
                raise ConfigError(
                    f"the plan places row {min(placed.start, last)} of {name} {what}; plan this model again."
                )
            last = placed.stop
        if last != tensors[name].shape[0]:
            raise ConfigError(
                f"the plan places {last} rows of {name}, but it has {tensors[name].shape[0]}; plan this model again."
            )
    return {name: tuple(rows) for name, rows in found.items()}


def planned_nbytes(rows: Mapping[str, Sequence[PlacedRows]]) -> dict[str, int]:
    """Bytes of weights in each place, as planned."""
    found = dict.fromkeys(PLACES, 0)
    for parts in rows.values():
        for part in parts:
            found[part.place] += part.nbytes
    return found


def layer_layout(layer: LayerSpec, rows: Mapping[str, tuple[PlacedRows, ...]]) -> LayerLayout:
    """What the slot of a layer holds. `rows` by the tensor's name in the layer."""
    areas: list[Area] = []
    moves: list[Move] = []
    end = 0
    taken = {"host": 0, "disk": 0}
    away = [t for t in layer.tensors if any(part.place != "device" for part in rows[t.name])]
    vectors = [t for t in away if len(t.shape) == 1]

    def add_matrices(place: str, by_cpu: bool) -> None:
        nonlocal end
        for tensor in away:
            for part in rows[tensor.name]:
                if len(tensor.shape) > 1 and (part.place, part.by_cpu) == (place, by_cpu):
                    end, source = aligned(end), aligned(taken[place])
                    areas.append(Area(tensor.name, part, end, source if by_cpu else None))
                    moves.append(Move(place, tensor.name, part.start, source, end, part.nbytes, by_cpu))
                    end, taken[place] = end + part.nbytes, source + part.nbytes

    add_matrices("disk", by_cpu=False)
    on_disk = [part for t in vectors for part in rows[t.name] if part.place == "disk"]
    end = aligned(end + sum(part.nbytes for part in on_disk), PAGE)
    add_matrices("host", by_cpu=False)
    for tensor in vectors:
        end = aligned(end)
        parts = rows[tensor.name]
        whole = replace(parts[0], start=0, stop=tensor.shape[0], nbytes=sum(part.nbytes for part in parts))
        areas.append(Area(tensor.name, whole, end))
        for part in parts:
            moves.append(Move(part.place, tensor.name, part.start, taken.get(part.place, 0), end, part.nbytes))
            if part.place in taken:
                taken[part.place] += part.nbytes
            end += part.nbytes
    left = end
    add_matrices("host", by_cpu=True)
    return LayerLayout(layer.index, dict(rows), tuple(areas), tuple(moves), _copies(moves), end, left, taken)


def _copies(moves: Sequence[Move]) -> tuple[Copy, ...]:
    """Moves of one place whose sources and targets lie equally far apart, with less than an alignment between them,
    are one copy.
    """
    found: list[Copy] = []
    for move in sorted((m for m in moves if m.place != "device"), key=lambda m: (m.place, m.source)):
        if found and (found[-1].place, found[-1].by_cpu) == (move.place, move.by_cpu):
            last = found[-1]
            gap = move.source - last.source - last.nbytes
            if gap == move.target - last.target - last.nbytes and gap < ALIGNMENT:
                found[-1] = Copy(last.place, last.source, last.target, last.nbytes + gap + move.nbytes, move.by_cpu)
                continue
        found.append(Copy(move.place, move.source, move.target, move.nbytes, move.by_cpu))
    return tuple(found)
