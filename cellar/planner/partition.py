"""A model over many devices: what a layout costs, and which layouts serve prefill and decode best.

Price of one block on every device (all do the same): the products take as long as the slowest of matrix units, memory
and the gathering of weights, which goes on a layer ahead; attention follows, then the collectives on activations, of
which nothing hides unless they are `looped` into the products. Bandwidth of a collective is the network's whole rate
per device, as in Pope et al.; hops along rings are added as latency, or lines say both where collectives were measured.
Axes in `outer` cross hosts and use the outer network.

1D by heads is tensor parallelism: its steps are captured, its sums are one collective each, and where these go through
boxes in peers' memory long steps are cut into micro-batches. Steps of other layouts are launched kernel by kernel, and
last as long as their host takes for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cellar.core.layouts import GATHERS, Layout, Mesh
from cellar.core.loops import loop_chunks
from cellar.core.micro_batches import MicroBatchSizes
from cellar.planner.collectives import Collectives
from cellar.planner.cost import Channel, Dimensions, Group, Timeline
from cellar.planner.layouts import Local, Move, Product, block_program, relay_moves
from cellar.planner.machines import Constants, Machine
from cellar.planner.sharding import Kind, volume


@dataclass(frozen=True, slots=True)
class Formats:
    """Bytes per element of stored weights and KV (with their scales). Activations have two.

    `compute` is the dtype of the products: what is stored in fewer bits is unpacked to it. `quantization` and
    `kv_cache_dtype` are the options of an engine that make a plain model so; empty: they are left out.
    """

    name: str
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    compute: str = "bfloat16"
    quantization: str = ""
    kv_cache_dtype: str = ""

    @property
    def table_bytes(self) -> float:
        """Bytes per element of tables and head, which are not quantized."""
        return 4.0 if self.compute == "float32" else 2.0


BF16 = Formats("bf16")
FLOAT32 = Formats("float32", 4.0, 4.0, "float32")
# One scale of two bytes per output channel is nothing beside it; 4 bits in groups of 64 with scale and minimum are 4.5.
INT8 = Formats("int8", 1.0, 2.0, quantization="int8")
FP8 = Formats("fp8", 1.0, 2.0, quantization="fp8")
INT4 = Formats("int4", 4.5 / 8, 2.0, quantization="int4")
INT4_KV4 = Formats("int4+kv4", 4.5 / 8, 4.5 / 8, quantization="int4", kv_cache_dtype="int4")
FORMATS = {form.name: form for form in (BF16, INT8, FP8, INT4, INT4_KV4, FLOAT32)}


def formats_of(dtype: str) -> Formats:
    """How a model is stored that runs in `dtype` as it is; float16 costs what bfloat16 does."""
    return FLOAT32 if dtype == "float32" else BF16


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences of `new` tokens each, which end at `context` tokens. `sampled` positions go to the head."""

    batch: int
    new: int
    context: float

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.new


def padded_heads(d: Dimensions, chips: int) -> Dimensions | None:
    """Heads filled up to a multiple of the chips (PaLM 540B: 48 to 64); None where groups of K and V forbid it."""
    heads = -(-d.heads // chips) * chips
    if heads == d.heads:
        return d
    if d.kv_heads == d.heads:
        return replace(d, heads=heads, kv_heads=heads)
    return replace(d, heads=heads) if d.kv_heads == 1 else None


SUM_BYTES = 4
"""Of a number that a norm adds up over a cut E: float32, whatever activations are."""


def sizes_of(d: Dimensions, work: Work) -> dict[str, float]:
    """Sizes of the letters of `layouts`, in elements of two bytes where those have another size."""
    return {
        "B": float(work.batch),
        "L": float(work.new),
        "S": float(max(work.context - work.new, 0)),
        "E": float(d.embed),
        "F": float(d.mlp),
        "G": 2.0 if d.gated else 1.0,
        "H": float(d.heads),
        "K": float(d.kv_heads),
        "D": float(d.head_dim),
        "N": SUM_BYTES / 2.0 * d.norm_sums,
        "V": float(d.vocab),
    }


def fits_shape(layout: Layout, d: Dimensions, batch: int) -> bool:
    """Whether every dimension is a multiple of the chips that cut it."""
    mesh = layout.mesh
    return (
        batch % mesh.count(layout.batch_axes) == 0
        and batch % mesh.count(layout.gather) == 0
        and d.embed % mesh.size == 0
        and d.mlp % mesh.size == 0
        and d.heads % mesh.size == 0
    )


@dataclass(frozen=True, slots=True)
class Term:
    """One collective over the inner network: elements per chip, and how often it begins (0: with another one)."""

    kind: Kind
    chips: int
    elements: float
    begins: float


class Span(NamedTuple):
    """Of steps of more than `above` tokens: `fixed` seconds, and `each` a token."""

    above: float
    fixed: float
    each: float


@dataclass(frozen=True, slots=True)
class Sent:
    """What collectives send: elements per chip over the inner and the outer network, and hops along each. `terms`: one
    by one what goes over the inner.
    """

    inner: float = 0.0
    outer: float = 0.0
    inner_hops: float = 0.0
    outer_hops: float = 0.0
    terms: tuple[Term, ...] = ()

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.inner + other.inner,
            self.outer + other.outer,
            self.inner_hops + other.inner_hops,
            self.outer_hops + other.outer_hops,
            self.terms + other.terms,
        )

    def elements(self, tokens: float = 1.0) -> float:
        """Elements over both networks, for so many tokens."""
        return (self.inner + self.outer) * tokens

    def seconds(self, machine: Machine, item: float, tokens: float, chips: int) -> float:
        """Time of all the collectives, `item` bytes an element, one after another, in a box of so many chips."""
        small, *larger = self.spans(machine, item, chips)
        _, fixed, each = next((span for span in reversed(larger) if tokens > span.above), small)
        return fixed + each * tokens

    def spans(self, machine: Machine, item: float, chips: int) -> tuple[Span, ...]:
        """`seconds` over the tokens, by ascending `above` from 0 on: one, or more where collectives were measured."""
        if not machine.networks:
            return (Span(0.0, 0.0, 0.0),)
        near, far = machine.networks[0], machine.networks[-1]
        share = machine.constants.network.value
        fixed, each = self.outer_hops * far.hop.value, self.outer / far.bandwidth.value / share * item
        if near.measured is None:
            each += self.inner / near.rate(chips) / share * item
            return (Span(0.0, fixed + self.inner_hops * near.hop.value, each),)
        inner = _measured_spans(self.terms, near.measured, item)
        return tuple(Span(span.above, fixed + span.fixed, each + span.each) for span in inner)


@lru_cache(maxsize=16384)
def _measured_spans(terms: tuple[Term, ...], measured: Collectives, item: float) -> tuple[Span, ...]:
    """A span for each set of lines that these collectives have at some number of tokens."""
    known = [(term, measured.of(term.kind.value, term.chips).lines, term.elements * item) for term in terms]
    edges = {0.0, *(line.most / nbytes for _, lines, nbytes in known for line in lines[:-1])}
    found = []
    for edge in sorted(edges):
        now = [
            (term, next(line for line in lines if edge < line.most / nbytes), nbytes) for term, lines, nbytes in known
        ]
        fixed = sum(term.begins * line.start for term, line, _ in now)
        found.append(Span(edge, fixed, sum(line.each * nbytes for _, line, nbytes in now)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class BlockWork:
    """One block on one chip: what grows with the tokens of the step (per token), and what does not (weights).

    `products`: the weights of each that is launched; `begun`: collectives that begin. `tensor`: it runs as tensor
    parallelism does.
    """

    flops: float
    weight_elements: float
    activation_elements: float
    query_elements: float
    activations: Sent
    weights: Sent
    loops: tuple[LoopWork, ...] = ()
    products: tuple[float, ...] = ()
    begun: int = 0
    tensor: bool = False
    chips: int = 1

    @property
    def captured(self) -> bool:
        """Whether decodes are launched as one graph."""
        return self.tensor or self.chips == 1

    def device_launches(self, machine: Machine, weight_bytes: float) -> float:
        """Seconds on the device beside all else: kernels start and end, and small products do not hide it."""
        found, ranks = machine.constants.layer_seconds.value, machine.ranks
        if self.tensor:
            byte = weight_bytes / (machine.device.bandwidth.value * machine.constants.hbm.value)
            return found + sum(max(0.0, ranks.product_seconds.value - count * byte) for count in self.products)
        return found if self.captured else found + ranks.layer_seconds.value

    def host_launches(self, machine: Machine) -> float:
        """Seconds that the host takes to launch what is not captured."""
        found = machine.constants.eager_seconds.value
        if not self.captured:
            found += self.begun * machine.ranks.call_seconds.value
        return found

    def boxes(self, machine: Machine) -> bool:
        """Whether its sums go through boxes in peers' memory: then no step is looped."""
        near = machine.networks[0].measured if machine.networks else None
        return self.tensor and near is not None and near.boxes


@dataclass(frozen=True, slots=True)
class PartsPrice:
    """Micro-batches of a block's long steps: a token takes `copying` seconds of copy engines, behind which the products
    of another run, and `adding` to add up what came.
    """

    sizes: MicroBatchSizes
    copying: float
    adding: float

    def exposed(self, tokens: float, busy: float) -> float:
        """Seconds of sums that are waited for in a step whose products and attention take `busy`."""
        return self.adding * tokens + max(0.0, self.copying * tokens - busy)


def parts_price(d: Dimensions, unit: BlockWork, machine: Machine) -> PartsPrice | None:
    """None if this block's steps are not cut.

    Of R ranks each sends the others their pieces of its part, and everyone the rows that it has added; of these it
    reads R pieces and the residual stream, and writes that and what is normed (docs/decisions/0089-micro-batches.md).
    """
    rate = machine.ranks.copies.value
    if not rate or not unit.boxes(machine):
        return None
    part, ranks = 2.0 * d.embed, unit.chips
    sums = len(unit.activations.terms)
    memory = machine.device.bandwidth.value * machine.constants.hbm.value
    sizes = MicroBatchSizes.of(d.layer_elements, 2 * d.embed, ranks)
    return PartsPrice(sizes, sums * 2 * part * (ranks - 1) / ranks / rate, sums * part * (ranks + 3) / ranks / memory)


@dataclass(frozen=True, slots=True)
class LoopWork:
    """Products and the collectives that run beside them if they are looped: FLOPs, and what is sent, of one token."""

    flops: float
    weight_elements: float
    sent: Sent


@dataclass(frozen=True, slots=True)
class LoopPrice:
    """What loops change in a step, all blocks: `hidden` seconds a token at most, of a chunk more `chunk` seconds in
    collectives that begin, and `weight_elements` that are read again.

    A loop of n chunks takes (t + c)/n + (1 - 1/n) max(t, c) where products take t and collectives c.
    """

    hidden: float
    chunk: float
    weight_elements: float

    def saved(self, tokens: float, chunks: int) -> float:
        """Seconds of collectives that products hide."""
        return self.hidden * tokens * (1 - 1 / chunks)


def loop_price(loops: Sequence[LoopWork], machine: Machine, flop: float, chips: int, layers: float) -> LoopPrice:
    """Of these loops of a block, at `flop` seconds a FLOP, in so many blocks."""
    hidden = chunk = elements = 0.0
    for loop in loops:
        _, begun, sending = loop.sent.spans(machine, 2.0, chips)[-1]  # chunks are long
        hidden += min(loop.flops * flop, sending)
        chunk += begun
        elements += loop.weight_elements
    return LoopPrice(hidden * layers, chunk * layers, elements * layers)


_LOOPS = {
    False: {"n": 0, "sums": 0, "q": 0, "k": 0, "v": 0, "o": 1, "n1": 2, "h": 2, "f": 2, "m": 2},
    True: {"o": 2, "h": 2, "f": 2, "m": 2, "y": 2},
}
"""Registers of a block's program (parallel or not) by the loop that has their products and collectives: into attention,
out of it, and the feed-forward (`models/points.py`). What attention spreads and returns is in none.
"""


def _sent(move: Move, sizes: dict[str, float], mesh: Mesh, outer: str, topology: str) -> Sent:
    """One collective. Over axes of both networks the slow ones go first, when there is least to send."""
    elements = volume(move.kind, move.before, move.after, move.axes, sizes, mesh)
    if elements == 0:
        return Sent()
    slow = "".join(a for a in move.axes if a in outer)
    fast = "".join(a for a in move.axes if a not in outer)
    ks, kf = mesh.count(slow), mesh.count(fast)
    whole = elements * ks * kf / (ks * kf - 1)
    crossing = whole * (ks - 1) / ks
    if move.kind is not Kind.ALL_TO_ALL:
        crossing /= kf
    inside = whole * (kf - 1) / kf
    terms = (Term(move.kind, kf, inside, 0.0 if move.fused else 1.0),) if inside else ()
    return Sent(inside, crossing, _hops(move, mesh, fast, topology), _hops(move, mesh, slow, topology), terms)


def _hops(move: Move, mesh: Mesh, axes: str, topology: str) -> float:
    if move.fused or mesh.count(axes) == 1:
        return 0.0
    passes = 2 if move.kind is Kind.ALL_REDUCE else 1
    if topology != "torus":
        return passes
    # A ring passes every piece round; an all-to-all goes straight, half way round at most.
    if move.kind is Kind.ALL_TO_ALL:
        return sum(mesh.count(a) // 2 for a in axes)
    return passes * mesh.hops(axes)


def _sums(d: Dimensions, mesh: Mesh, topology: str) -> Sent:
    """Of one token, in tensor parallelism: what attention and feed-forward leave, in a parallel block both at once."""
    chips, count = mesh.size, 1 if d.parallel else 2
    elements = 2.0 * d.embed * (chips - 1) / chips
    hops = 2 * (mesh.hops("zy") if topology == "torus" else 1)
    return Sent(count * elements, 0.0, count * hops, 0.0, (Term(Kind.SUM, chips, elements, 1.0),) * count)


@lru_cache(maxsize=16384)
def block_work(d: Dimensions, layout: Layout, outer: str, topology: str, laid: bool = False) -> BlockWork:
    """The work of one token, read off the layout's program; all of it is linear in the tokens of a step.

    `laid`: tensor parallelism, too, is run as other layouts are (`benchmarks/layouts.py`).
    """
    mesh, sizes = layout.mesh, sizes_of(d, Work(1, 1, 1))
    flops = weights = activations = query = 0.0
    products: dict[str, float] = {}
    begun = 0
    sent, gathered = Sent(), Sent()
    # FLOPs, weights and what is sent of each loop.
    loops: list[list[Any]] = [[0.0, 0.0, Sent()] for _ in range(3)]
    loop_of, entered = _LOOPS[d.parallel], False
    for s in block_program(layout, d.kv_heads, d.parallel).statements:
        match s:
            case Product():
                cuts = dict(zip(s.left.dims + s.right.dims, s.left.axes + s.right.axes, strict=True))
                one_flops = 2.0 * math.prod(sizes[dim] / mesh.count(axes) for dim, axes in cuts.items())
                one_weights = s.right.local(sizes, mesh)
                flops, weights = flops + one_flops, weights + one_weights
                launched = "q" if s.out in ("k", "v") else s.out
                products[launched] = products.get(launched, 0.0) + one_weights
                if (at := loop_of.get(s.out)) is not None:
                    loops[at][0] += one_flops
                    loops[at][1] += one_weights
                activations += s.left.local(sizes, mesh) + s.result.local(sizes, mesh)
            case Move() if s.kind is not Kind.SLICE:
                one = _sent(s, sizes, mesh, outer, topology)
                begun += one.elements() > 0 and not s.fused
                if s.weight:
                    gathered += one
                    continue
                sent += one
                if s.name in ("q", "k", "v"):  # spread after the loop has ended
                    continue
                at = loop_of.get(s.name)
                if at is not None and s.name == "sums":
                    at = 2 if entered else 0
                entered = entered or s.name == "n1"
                # What enters a LayerNorm is gathered before.
                if at is not None and not (d.norm_sums > 1 and s.name in ("n", "n1", "sums")):
                    loops[at][2] += one
            case Local(what="attend"):
                query += s.result.local(sizes, mesh)
            case _:
                pass
    made = tuple(LoopWork(*loop) for loop in loops if loop[2] != Sent())
    tensor = not laid and not outer and layout.is_tensor_parallel(d.kv_heads)
    if tensor:
        sent = _sums(d, mesh, topology)
    launched_products = tuple(products.values())
    return BlockWork(
        flops, weights, activations, query, sent, gathered, made, launched_products, begun, tensor, mesh.size
    )


def block_timeline(
    d: Dimensions,
    machine: Machine,
    layout: Layout,
    work: Work,
    formats: Formats = BF16,
    *,
    outer: str = "",
    looped: bool = False,
    layers: int | None = None,
) -> Timeline:
    """The timeline of `layers` blocks (default: all) and the head on one device. Heads of `d` are padded already.

    `looped`: a long step is cut into chunks, one of which is sent while the next is multiplied (`core/loops.py`), but
    not where micro-batches do the same.
    """
    c, mesh = machine.constants, layout.mesh
    unit = block_work(d, layout, outer, machine.networks[0].topology if machine.networks else "switch")
    tokens = float(work.tokens)
    peak, hbm_peak = machine.flops(formats.compute), machine.device.bandwidth.value

    def on_device(flops: float, nbytes: float, matmul: float, hbm: float) -> tuple[Channel, Channel]:
        return (
            Channel("compute", flops / (peak * matmul), flops, "FLOP", flops / peak),
            Channel("device memory", nbytes / (hbm_peak * hbm), nbytes, "bytes", nbytes / hbm_peak),
        )

    shares = (c.matmul.value, c.hbm.value)

    repeat = float(d.layers if layers is None else layers)
    parts = parts_price(d, unit, machine) if repeat == d.layers else None
    count = 1 if parts is None else parts.sizes.count(work.tokens)
    chunks = loop_chunks(work.tokens // mesh.count(layout.gather)) if looped and not unit.boxes(machine) else 1
    loops = loop_price(unit.loops, machine, 1 / (peak * c.matmul.value), mesh.size, 1.0)
    weights = count * unit.weight_elements + (chunks - 1) * loops.weight_elements
    read = weights * formats.weight_bytes + 2 * tokens * unit.activation_elements
    products = [*on_device(unit.flops * tokens, read, *shares)]
    groups = []
    gathering = unit.weights.seconds(machine, formats.weight_bytes, 1.0, mesh.size)
    if gathering:
        # Those of the first layer are waited for, those of the others come while the one before is computed.
        sent = unit.weights.elements() * formats.weight_bytes
        hidden = machine.ranks.gather_overlap.value * (repeat - 1) / repeat
        awaited = repeat * (1 - hidden)
        products.append(Channel("weight gathers", gathering * hidden, sent * hidden))
        groups.append(Group("awaited gathers", (Channel("weight gathers", gathering * awaited, sent * awaited),)))
    seen = d.seen(work.context - (work.new - 1) / 2)
    batch = work.batch / mesh.count(layout.batch_axes)
    kv = d.kv_elements() / mesh.count(layout.kv_axes(d.kv_heads))
    cache = batch * d.seen(work.context) * kv * formats.kv_bytes
    reached = (c.attention_matmul.value, c.attention_hbm.value)
    attention = on_device(4 * unit.query_elements * tokens * seen, cache, *reached)
    exposed = unit.activations.seconds(machine, 2.0, tokens, mesh.size)
    if hidden := loops.saved(tokens, chunks):
        exposed += (chunks - 1) * loops.chunk - hidden
        products.append(Channel("collectives", hidden))
    block = (
        Group("products", tuple(products), 1.0, repeat),
        Group("unhidden", unhidden(c, products), 1.0, repeat),
        Group("attention", attention, 1.0, repeat),
    )
    if parts is not None and count > 1:
        exposed = parts.exposed(tokens, sum(group.seconds for group in block) / repeat)
    if exposed:
        talk = Channel("collectives", exposed, 2 * unit.activations.elements(tokens))
        groups.append(Group("collectives", (talk,), 1.0, repeat))
    groups += block
    if launches := unit.device_launches(machine, formats.weight_bytes):
        groups.append(Group("launches", (Channel("launches", launches),), 1.0, repeat))
    elements = d.head_elements / mesh.size
    head = on_device(2.0 * work.batch * elements, elements * formats.table_bytes, *shares)
    groups += [Group("head", head), Group("unhidden", unhidden(c, head))]
    if c.step_seconds.value:
        groups.append(Group("step", (Channel("launches", c.step_seconds.value),)))
    if work.new > 1 or not unit.captured:
        waits = count * repeat * unit.host_launches(machine) - sum(group.seconds for group in groups)
        if waits > 0:
            groups.append(Group("launching", (Channel("launches", waits),)))
    return Timeline(tuple(groups))


def unhidden(c: Constants, product: Sequence[Channel]) -> tuple[Channel, ...]:
    """What a product's compute does not hide of its memory, or the other way round; they are its first two channels."""
    seconds = (1 - c.product_overlap.value) * min(product[0].seconds, product[1].seconds)
    return (Channel("unhidden", seconds),) if seconds else ()


@lru_cache(maxsize=256)
def meshes(chips: int, hosts: int = 1) -> tuple[tuple[Mesh, str], ...]:
    """All boxes of `chips`, each with the axes that cross hosts (so many that exactly `hosts` lie along them)."""
    found = []
    for x in _divisors(chips):
        for y in _divisors(chips // x):
            mesh = Mesh(x, y, chips // x // y)
            if hosts == 1:
                found.append((mesh, ""))
                continue
            for outer in ("x", "y", "z", "xy", "xz", "yz", "xyz"):
                if mesh.count(outer) == hosts and all(mesh.count(a) > 1 for a in outer):
                    found.append((mesh, outer))
    return tuple(found)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def torus(chips: int) -> Mesh:
    """The most cubic box of a power of two: 64 is 4 x 4 x 4, 32 is 2 x 4 x 4, 16 is 2 x 2 x 4."""
    power = chips.bit_length() - 1
    each = [power // 3, (power + 1) // 3, (power + 2) // 3]
    return Mesh(*(2**p for p in each))


@dataclass(frozen=True)
class Choice:
    """A layout with its price for one piece of work. `outer`: axes that cross hosts. `looped`: see `block_timeline`."""

    layout: Layout
    outer: str
    timeline: Timeline
    looped: bool = False

    @property
    def name(self) -> str:
        """Layout and attention in the words of Pope et al., e.g. `2D heads`."""
        return f"{self.layout.name} {self.layout.attention}"


def choices(
    d: Dimensions,
    machine: Machine,
    chips: int,
    work: Work,
    formats: Formats = BF16,
    *,
    mesh: Mesh | None = None,
    outer: str = "",
    hosts: int = 1,
    looped: bool = False,
    layers: int | None = None,
) -> Iterator[Choice]:
    """Every layout that the shapes allow, priced; `looped`: with loops where these are faster. `mesh` (with its `outer`
    axes) fixes the box.
    """
    padded = padded_heads(d, chips)
    if padded is None:
        return
    boxes = ((mesh, outer),) if mesh else meshes(chips, hosts)
    for box, crossing in boxes:
        for layout in distinct_layouts(box, padded.kv_heads):
            if fits_shape(layout, padded, work.batch):
                price = partial(block_timeline, padded, machine, layout, work, formats, outer=crossing, layers=layers)
                found = Choice(layout, crossing, price())
                if looped and loop_chunks(work.tokens // box.count(layout.gather)) > 1:
                    cut = Choice(layout, crossing, price(looped=True), looped=True)
                    found = min(found, cut, key=lambda choice: choice.timeline.seconds)
                yield found


@lru_cache(maxsize=1024)
def distinct_layouts(mesh: Mesh, kv_heads: int) -> tuple[Layout, ...]:
    """Layouts of a box that differ: axes of one chip cut nothing, so cuts along them are left out.

    A mixture of heads and batch is worth having only where it repeats no cache: its head axes divide the heads of K, V.
    """
    found: dict[tuple[object, ...], Layout] = {}
    for gather in GATHERS:
        spread = Layout(mesh, gather).spread
        for stop in range(len(spread) + 1):
            layout = Layout(mesh, gather, spread[:stop])
            if layout.attention == "mixed" and layout.kv_copies(kv_heads) > 1:
                continue
            key = (mesh.count(gather), *_real(mesh, gather), *_real(mesh, layout.head_axes))
            found.setdefault(key, layout)
    return tuple(found.values())


def _real(mesh: Mesh, axes: str) -> tuple[str, ...]:
    return tuple(a for a in axes if mesh.count(a) > 1)


def kv_bytes_per_chip(d: Dimensions, layout: Layout, batch: int, context: float, formats: Formats = BF16) -> float:
    """Bytes of KV on one chip, all layers; `d` padded."""
    whole = batch * context * d.kv_elements() * d.layers * formats.kv_bytes
    return whole / layout.mesh.count(layout.batch_axes) / layout.mesh.count(layout.kv_axes(d.kv_heads))


def relay_bytes(
    d: Dimensions, source: Layout, target: Layout, batch: int, tokens: float, formats: Formats = BF16
) -> float:
    """Bytes that each chip sends when the caches of `batch` sequences go from one layout to another; `d` padded."""
    sizes = {"B": float(batch), "S": float(tokens), "K": 2.0 * d.kv_heads, "D": float(d.head_dim)}
    moves = relay_moves(source, target, d.kv_heads)
    sent = sum(volume(move.kind, move.before, move.after, move.axes, sizes, source.mesh) for move in moves)
    return sent * d.layers * formats.kv_bytes
