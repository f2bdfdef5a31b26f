"""A model on a device that holds only a part of it, planned from bytes alone: weights may lie elsewhere.

What must be on the device comes first: head and vectors, the ring (two slots of what comes of one layer), the KV
cache, a step's activations and logits; on a processor tables, too. Beside an accelerator these lie in host memory if it
has room, since a step reads as many of their rows as it has tokens. Then as many rows of every layer as fit, its
matrices one after another, the same ones in all layers; then host memory, then disk: so at most two matrices of a layer
are cut. All else being fixed, a byte in a faster place is never worse, so this is what the linear program of
`linear.py` finds where only weights may leave the device; it needs no rates. They say how much KV the device has, or
whether the host has it, what is predicted (`passes.py`), and how many sequences end within a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from cellar.core.errors import CapacityError
from cellar.core.messages import BlockSchedule, Placed, PlacedUnits, Placement
from cellar.core.pieces import ALIGNMENT, cut_at_most, format_name, is_ordered, rows_nbytes, runs
from cellar.core.specs import LayerSpec, ModelSpec, TensorSpec
from cellar.planner.cost import dimensions
from cellar.planner.moves import LEAST_ROWS, Away, Few, few_tokens, matrices_of, pass_moves, rows_left
from cellar.planner.offload import Job, Schedule, logits_bytes, working_bytes
from cellar.planner.passes import (
    MOST_OVER_LINK,
    block_seconds,
    decode_seconds,
    foreseen,
    kv_over_link,
    kv_sequences,
    longest,
    most_within,
    pass_cost,
    predicted_pass,
    too_slow,
)
from cellar.planner.rates import Rates, in_formats
from cellar.planner.saved import Limits, SavedPlan, geometry_of, kv_cache_dtype_of
from cellar.planner.work import StepCost

KV_SHARE = 0.25
"""Of the device's memory, for KV, if nobody says how much: more sequences share a pass's weights, fewer rows stay."""

CUT = 3.75
"""How much more than of whole matrices a step's activations take where matrices are cut: of OPT-30B's passes of 8,192
tokens an H200's allocator kept 3.1 GiB, where 2.5 times left 2.5; of Llama-3-70B's it kept 3.6 GiB, 3.2 times of these.
"""

WAVES = 4
"""In up to so many equal parts the sequences may run one after another, each with all its KV on the device."""

BATCH_TOKENS = 8192
"""Tokens of a pass that an accelerator computes at a time, if sequences are short enough: activations stay small."""

MOST_BATCHES = 16
"""Of a pass: each is a launch of everything."""

LIBRARIES = 3 * 2**27
"""Bytes of an accelerator's memory that its libraries and the choice of tokens take beside, with a margin: of steps of
128 tokens of Llama-3-8B they took 0.23 GiB, the activations counted in.
"""

PIECES = 3 * 2**27
"""So much more, at most, stays with its allocator in pieces, no more than the activations that it serves; all of it is
left to a model that fits, whose steps are captured.
"""

MOST_IN_CODES = 192
"""Tokens up to which an accelerator multiplies by codes of every format; of more it writes the matrix out."""

RING_SLOTS = 2
_PAGE = 4096
_STEPS = 1 << 12
_UNIT = 64
"""Rows of large matrices go in so many."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the model in each place; `host` None: as much as it takes. `kv`: bytes of KV, None: `KV_SHARE`.
    `kind` of device: cpu or gpu. `chunks`: of KV, as many as another rank has, wherever they lie; None: any number.
    """

    device: int
    host: int | None = None
    disk: int = 0
    kv: int | None = None
    kind: str = "cpu"
    chunks: int | None = None


def fits(spec: ModelSpec, room: Room, limits: Limits) -> bool:
    """True if the whole model, KV of `room` and a step's buffers are on the device.

    On an accelerator KV for one request of the longest context is enough: a byte of weights that makes room for KV
    would cross the link in each pass, which takes longer than that KV saves.
    """
    # A tied head is multiplied by in a form of its own on a processor.
    second = sum(t.nbytes for t in spec.head if spec.tied_head and t.name == "lm_head" and room.kind == "cpu")
    kv = _kv_nbytes(spec, room)
    if room.kind != "cpu" and room.kv is None:
        kv = -(-limits.max_model_len // spec.kv.chunk_size) * spec.kv.chunk_nbytes()
    return spec.nbytes() + second + kv + _buffers(spec, limits, room.kind, captured=True) <= room.device


def capped_plan(
    spec: ModelSpec,
    room: Room,
    limits: Limits,
    *,
    model: str,
    machine: str,
    rates: Rates | None = None,
    job: Job | None = None,
    latency: float | None = None,
    order: Schedule = "zigzag",
    passes: int = 1,
) -> SavedPlan:
    """The plan. `limits.max_num_seqs` sequences pass a layer as one batch, or so many that `job` (default: the longest
    request) ends within `latency` seconds. With `passes` the model is a stage of a pipeline, which has so many passes
    in turn: each takes a part of the sequences, whose KV is there at once, and `limits` has the tokens of one.

    On an accelerator KV lies there or, where more sequences a pass are worth it at these rates, in host memory, where
    the CPU attends to it. Raises CapacityError, which says how much is missing where; ConfigError if no plan keeps the
    latency, which says what the fastest takes.
    """
    job = job or longest(limits)
    rates = rates or (Rates() if room.kind == "cpu" else in_formats(Rates(), spec))
    best = _best(spec, room, limits, rates, job, latency, order, passes)
    limits, division, cost, kv = best.limits, best.division, best.cost, best.kv
    place, batch = best.away.kv_place, _sequences_at_a_time(limits, room.kind)
    chunks = kv // spec.kv.chunk_nbytes()
    over = round(best.over_link * chunks)
    # In passes of few tokens the CPU multiplies as much of host memory as it reads while the link moves the rest. Where
    # it is the device, it multiplies all of it as it lies.
    left = division.warm
    if room.kind != "cpu":
        matrices = sum(t.nbytes for layer in spec.layers for t in matrices_of(layer))
        left = min(left, rows_left(spec, rates, best.away, best.few).nbytes / max(1, matrices))
    cuts = (division.kept, division.kept + division.warm - left, division.kept + division.warm)
    weights, on_disk = _placed(spec, room.kind, division.tables, *cuts)
    if on_disk > room.disk:
        raise CapacityError(
            f"beside {_gib(room.device)} of device_memory and {_gib(room.host or 0)} of host_memory {_gib(on_disk)} of "
            f"weights are left, but disk is {_gib(room.disk)}; raise one of them, in GiB."
        )
    placement = Placement(
        weights,
        place,
        "device",
        "offload",
        tuple(
            units
            for units in (PlacedUnits(place, chunks - over, place), PlacedUnits(place, over, "device"))
            if units.units
        ),
        (PlacedUnits("device", limits.max_num_seqs, "device"),),
        BlockSchedule(batch, -(-limits.max_num_seqs // batch), order),
    )
    said = f"weights offloaded, {100 * division.kept:.1f} % of each layer on the device, KV in {place} memory"
    seconds = predicted_pass(spec, rates, best.away, best.few, best.count, limits.max_model_len, best.over_link)
    return SavedPlan(
        model=model,
        geometry=geometry_of(spec),
        dtype=spec.dtype,
        chunk_size=spec.kv.chunk_size,
        machine=machine,
        device=room.kind,
        placement=placement,
        limits=limits,
        cost=cost,
        steps=(),
        figures={
            "plan": said,
            "machine": machine,
            "rates": asdict(rates),
            "decode_pass": {"sequences": best.count, "seconds": dict(seconds)},
            "moves": asdict(pass_moves(spec, rates, best.away, best.few)),
            "predicted": asdict(foreseen(cost, job, best.count, limits, order, passes)),
        },
        kv_cache_dtype=kv_cache_dtype_of(spec),
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to divide, with its price: `kv` bytes of KV, for `count` sequences a pass, within `limits`; `over_link`:
    the share of KV in host memory that the device attends to. `few`: passes that leave rows to the CPU.
    """

    division: _Division
    away: Away
    kv: int
    count: int
    cost: StepCost
    limits: Limits
    speed: float
    over_link: float
    few: Few


def _best(
    spec: ModelSpec,
    room: Room,
    limits: Limits,
    rates: Rates,
    job: Job,
    latency: float | None,
    order: Schedule,
    passes: int,
) -> _Choice:
    """The way that makes most tokens a second, within the bound. Raises CapacityError or ConfigError."""
    found: list[_Choice] = []
    missing: CapacityError | None = None
    fastest = math.inf
    context = job.prompt + job.generate / 2
    few = few_tokens(spec, -(-limits.max_num_seqs // passes), rates.units, context)
    brings = rates.reads > 0 and any(group.dtype != spec.dtype for group in spec.kv.groups)
    brought = math.ceil(MOST_OVER_LINK * limits.max_num_seqs / passes) if brings else 0
    for place, kv in _kv_choices(spec, room, limits, bounded=latency is not None):
        try:
            division = _divide(spec, room, limits, kv, place, brought)
        except CapacityError as error:
            missing = missing or error
            continue
        if place == "host" and room.host is not None:
            kv = min(kv, room.host - division.in_host - division.table_nbytes)
        away = Away(division.in_host, max(0, division.away - division.in_host), place, room.kind)
        at_once = kv_sequences(spec, limits, kv, job if order == "diagonal" else None)
        count = -(-at_once // passes)
        over = kv_over_link(spec, rates, away, count * limits.max_model_len)
        cost = pass_cost(spec, rates, away, few, over)
        held = limits
        if latency is not None:
            fastest = min(fastest, block_seconds(cost, job, 1, limits, order))
            most = most_within(latency, cost, job, limits, order)
            if most == 0:
                continue
            count, held = min(count, most), replace(limits, max_num_seqs=most)
        if order == "diagonal":
            speed = foreseen(cost, job, count, limits, order).tokens_per_second
        else:
            waves = -(-held.max_num_seqs // min(at_once, passes * count))  # the last one is no larger than the others
            speed = held.max_num_seqs / waves / decode_seconds(cost, count, limits.max_model_len)
        found.append(_Choice(division, away, kv, count, cost, held, speed, over, few))
    if not found:
        if missing is not None and fastest == math.inf:
            raise missing
        raise too_slow(latency or 0.0, fastest, job)
    return max(found, key=lambda one: one.speed)


@dataclass(frozen=True, slots=True)
class _Division:
    """The share of each layer's bytes on the device, and in host memory; and bytes of layers away, and in host. The
    `tables` there, by name, are `table_nbytes`.
    """

    kept: float
    warm: float
    away: int
    in_host: int
    tables: frozenset[str]
    table_nbytes: int


def _divide(spec: ModelSpec, room: Room, limits: Limits, kv: int, place: str, brought: int = 0) -> _Division:
    """The division beside so many bytes of KV; where that lies in host memory, what a layer attends to of so many
    sequences is `brought` from there. Raises CapacityError.
    """
    chunks = kv // spec.kv.chunk_nbytes()
    needed = -(-limits.max_model_len // spec.kv.chunk_size)
    if chunks < needed:
        raise CapacityError(
            f"one request of max_model_len {limits.max_model_len} needs {_gib(needed * spec.kv.chunk_nbytes())} of KV, "
            f"but of a device_memory of {_gib(room.device)} it gets {_gib(kv)}; lower max_model_len, raise "
            "device_memory, or give kv_cache_memory_bytes."
        )
    matrices = {t.name for layer in spec.layers for t in layer.tensors if len(t.shape) == 2}
    fixed = _buffers(spec, limits, room.kind)
    if place == "device":
        fixed += chunks * spec.kv.chunk_nbytes()
    else:  # prompts of a pass are attended to in a layer's cache on the device
        a_layer = spec.kv.chunk_nbytes() // len(spec.layers)
        fresh = -(-limits.max_num_batched_tokens // spec.kv.chunk_size) + limits.max_num_seqs
        fixed += max(fresh, brought * needed) * a_layer
    limit = room.host
    if limit is not None and place == "host":
        limit -= needed * spec.kv.chunk_nbytes()
    tables = frozenset(t.name for t in spec.tables) if room.kind != "cpu" else frozenset()
    table_nbytes = sum(_aligned(t.nbytes) for t in spec.tables if t.name in tables)
    if limit is not None and table_nbytes > limit:
        tables, table_nbytes = frozenset(), 0
    elif limit is not None:
        limit -= table_nbytes
    elsewhere = {n for n, t in spec.named_tensors() if _in_layer(n) and t.name in matrices} | tables
    rest_of_model = ((n, t) for n, t in spec.named_tensors() if n not in elsewhere)
    fixed += sum(_aligned(_nbytes(t, 0, t.shape[0], room.kind)) for _, t in rest_of_model)
    layers = _kinds(spec.layers)
    apart = max((_apart(t, room.kind) for layer in layers for t in layer), default=0)

    def on_device(share: float) -> int:
        resident = sum(
            count * _aligned(_nbytes(t, 0, _rows(layer, k, share), room.kind))
            for layer, count in layers.items()
            for k, t in enumerate(layer)
        )
        here = share + warm(share) if room.kind == "cpu" else share
        come = [[(t, _rows(layer, k, here)) for k, t in enumerate(layer)] for layer in layers]
        slot = max(sum(_aligned(_nbytes(t, rows, t.shape[0], room.kind)) for t, rows in layer) for layer in come)
        # What lies in host memory, on disk, or is for the CPU takes places of its own in a slot, and a record whole
        # pages.
        ring = RING_SLOTS * -(-(slot + ALIGNMENT + 2 * apart + _PAGE) // _PAGE) * _PAGE + _PAGE
        return fixed + resident + (ring if slot else 0)

    def in_host(kept: float, share: float) -> int:
        cuts = [
            (t, _rows(layer, k, kept), _rows(layer, k, share + kept), count)
            for layer, count in layers.items()
            for k, t in enumerate(layer)
        ]
        found = sum(count * _aligned(_nbytes(t, first, last, room.kind)) for t, first, last, count in cuts)
        return found + len(spec.layers) * apart

    def warm(kept: float) -> float:
        rest = 1.0 - kept
        held = rest if limit is None else _largest(lambda share: in_host(kept, share * rest) <= limit)
        return rest if limit is None else (held or 0.0) * rest

    kept = _largest(lambda share: on_device(share) <= room.device)
    if kept is None:
        raise CapacityError(
            f"{'' if tables else 'tables, '}head, the ring of two layers, KV and buffers take "
            f"{_gib(on_device(0.0))}, but device_memory is "
            f"{_gib(room.device)}; raise it, or lower max_num_batched_tokens, max_num_seqs, max_model_len or "
            "kv_cache_memory_bytes."
        )

    share = warm(kept)
    return _Division(kept, share, in_host(kept, 1.0 - kept), in_host(kept, share), tables, table_nbytes)


def _kv_choices(spec: ModelSpec, room: Room, limits: Limits, *, bounded: bool) -> list[tuple[str, int]]:
    """Places for KV, and bytes. What is asked for lies on the device where there is room. Where time is `bounded`, less
    KV leaves room for more rows of weights.
    """
    needed = -(-limits.max_model_len // spec.kv.chunk_size)
    if room.chunks is not None:
        kv = room.chunks * spec.kv.chunk_nbytes()
        return [("device", kv), *([("host", kv)] if room.kind != "cpu" else [])]
    few = [count * needed * spec.kv.chunk_nbytes() for count in (1, 2, 4, 8, 16, 32)]
    if room.kind == "cpu":
        kv = _kv_nbytes(spec, room)
        return [("device", kv), *(("device", less) for less in few if bounded and room.kv is None and less < kv)]
    left = max(0, room.device - _buffers(spec, limits, room.kind))
    if room.kv is not None:
        return [("device", room.kv)] if room.kv <= left / 2 else [("host", room.kv)]
    at_once = [-(-limits.max_num_seqs // k) for k in range(1, WAVES + 1)]
    wanted, *parts = (count * needed * spec.kv.chunk_nbytes() for count in at_once)
    shares = (0.125, KV_SHARE, 0.5)
    found = [*(("device", min(wanted, int(left * share))) for share in shares), ("host", wanted)]
    found += [("device", kv) for kv in (wanted, *parts) if kv <= left]
    return [*found, *(("device", less) for less in few if bounded and less < min(wanted, left))]


def _placed(
    spec: ModelSpec, kind: str, tables: frozenset[str], first: float, second: float, third: float
) -> tuple[tuple[Placed, ...], int]:
    """Rows of each layer up to the share `first` on the device, up to `third` in host memory, about from `second` on
    for the CPU to multiply; `tables` in host memory; and bytes on disk.
    """
    found, on_disk = [], 0
    cuts = {
        f"layers.{layer.index}.{t.name}": cut
        for layer in spec.layers
        for matrices in (matrices_of(layer),)
        for t, cut in zip(matrices, _cuts(matrices, kind, first, second, third), strict=True)
    }
    for name, tensor in spec.named_tensors():
        whole = tensor.shape[0]
        a, b, c = cuts.get(name, (0, whole, whole) if name in tables else (whole,) * 3)
        parts = (("device", 0, a, "device"), ("host", a, b, "device"), ("host", b, c, "host"))
        for place, start, stop, compute in (*parts, ("disk", c, whole, "device")):
            if start < stop:
                found.append(Placed(name, place, start, stop, format_name(tensor), compute))
        on_disk += rows_nbytes(tensor, c, whole, kind)
    return tuple(found), on_disk


def _cuts(
    matrices: Sequence[TensorSpec], kind: str, first: float, second: float, third: float
) -> list[tuple[int, int, int]]:
    """Of each matrix the rows before which those shares of all end. Of the first one that is left to the CPU beside an
    accelerator it has `LEAST_ROWS`, or none while there are others (`moves.rows_left`).
    """
    ends = ([_rows(matrices, k, share) for k in range(len(matrices))] for share in (first, second, third))
    found = list(zip(*ends, strict=True))
    left = [k for k, (_, b, c) in enumerate(found) if b < c]
    if kind != "cpu" and len(left) > 1:
        a, b, c = found[left[0]]
        if c - b < min(LEAST_ROWS, matrices[left[0]].shape[0]):
            found[left[0]] = (a, c, c)
    return found


def _kinds(layers: Sequence[LayerSpec]) -> Counter[tuple[TensorSpec, ...]]:
    """Matrices of layers that differ in more than what their tensors are called in the checkpoint, and how many layers
    have such: what a division takes is the same for all of a kind.
    """
    return Counter(tuple(replace(t, stored=("",) * len(t.stored)) for t in matrices_of(layer)) for layer in layers)


def _in_layer(name: str) -> bool:
    return name.startswith("layers.")


def _nbytes(tensor: TensorSpec, start: int, stop: int, kind: str) -> int:
    """Bytes of rows; on a GPU the more of what either it or the CPU reads."""
    found = rows_nbytes(tensor, start, stop, kind)
    return found if kind == "cpu" or not tensor.formats else max(found, rows_nbytes(tensor, start, stop, "cpu"))


def _apart(tensor: TensorSpec, kind: str) -> int:
    """What a matrix that is cut once more takes at most beside its rows: what each piece brings along, aligned."""
    if not tensor.formats:
        return 0
    columns = sum(8 * tensor.shape[1] for run in runs(tensor) if is_ordered(run.format))
    return 8 * ALIGNMENT + columns


def _rows(matrices: Sequence[TensorSpec], k: int, share: float) -> int:
    """How many rows of the k-th lie in the first `share` of the bytes of all, which stand one after another."""
    wanted = math.floor(share * sum(t.nbytes for t in matrices) + 1e-6) - sum(t.nbytes for t in matrices[:k])
    tensor = matrices[k]
    whole = tensor.shape[0]
    rows = max(0, min(whole, wanted * whole // tensor.nbytes))
    return cut_at_most(tensor, rows if rows == whole or whole < 16 * _UNIT else rows // _UNIT * _UNIT)


def _largest(holds: Callable[[float], bool]) -> float | None:
    """The largest of the shares k / _STEPS for which it holds, given that it holds below; None if for none."""
    if holds(1.0):
        return 1.0
    low, high = -1, _STEPS - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle / _STEPS) else (low, middle - 1)
    return None if low < 0 else low / _STEPS


def _kv_nbytes(spec: ModelSpec, room: Room) -> int:
    return int(room.device * KV_SHARE) if room.kv is None else room.kv


def _sequences_at_a_time(limits: Limits, kind: str) -> int:
    """Sequences of a GPU batch (FlexGen §4.2): all of them, unless a pass has more tokens than `BATCH_TOKENS`."""
    most, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    if kind == "cpu" or tokens <= BATCH_TOKENS:
        return most
    return min(most, max(1, -(-most // MOST_BATCHES), BATCH_TOKENS // limits.max_model_len))


def _buffers(spec: ModelSpec, limits: Limits, kind: str, *, captured: bool = False) -> int:
    """A step's activations and logits; `captured`: steps are, which those of streamed models are not. On an accelerator
    the products of a cut matrix stand there twice, side by side and put together; its allocator keeps what it had, and
    the choice of tokens has tensors as large as the logits. Between layers the hidden rows of all GPU batches are
    there, and in the end all of them once more, side by side.
    """
    d, elements = dimensions(spec), 2 if spec.dtype == "float32" else 1
    tokens, between = limits.max_num_batched_tokens, 0
    if (batch := _sequences_at_a_time(limits, kind)) < limits.max_num_seqs:
        between = 4 * tokens * d.embed * 2 * elements
        tokens = min(tokens, batch * limits.max_model_len)
    logits = logits_bytes(d, limits.max_num_seqs) if spec.head else 0
    if kind == "cpu":
        return math.ceil(working_bytes(d, tokens) * elements + logits)
    # Gate and up are products; what comes of both is made when no other product is there any more.
    working = working_bytes(replace(d, mlp=d.mlp * 2 // 3) if d.gated else d, tokens) * elements
    activations = CUT * working + between + 6 * logits
    pieces = PIECES if captured else min(PIECES, activations)
    return math.ceil(activations + LIBRARIES + pieces + _expanded_nbytes(spec, limits))


def _expanded_nbytes(spec: ModelSpec, limits: Limits) -> int:
    """Of the largest quantized matrix that an accelerator writes out for passes of many tokens, two bytes a number."""
    tensors = [t for layer in spec.layers for t in layer.tensors if t.formats]
    if limits.max_num_seqs > MOST_IN_CODES:
        tensors += [t for t in spec.head if t.formats]
    return max((t.size * (4 if spec.dtype == "float32" else 2) for t in tensors), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
