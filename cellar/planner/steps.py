"""What one step of the engine costs, whatever its mixture of prompt chunks and decodes: the simulator's clock.

The same prices as `partition.block_timeline`, which knows batches of equal sequences only: its seconds depend on four
counts (tokens, sampled rows, positions attended to, positions whose K and V are read), so a step of any composition has
a price as soon as its counts are known. A test holds the two equal.
"""

from __future__ import annotations

from cellar.core.errors import CapacityError
from cellar.core.layouts import Layout, Mesh
from cellar.planner.cost import Channel, Dimensions, Group, Timeline
from cellar.planner.machines import Machine
from cellar.planner.offload import logits_bytes, working_bytes
from cellar.planner.partition import (
    BF16,
    Formats,
    Work,
    block_work,
    choices,
    kv_bytes_per_chip,
    loop_price,
    padded_heads,
    parts_price,
    unhidden,
)
from cellar.planner.resident import repeated_bytes, resident_bytes
from cellar.planner.work import Positions, StepCost, StepWork, step_work

TYPICAL = (32, 1024)
"""Sequences and context of the decode for which the layout over several devices is chosen."""


class StepPrices:
    """Seconds of steps of one model on one machine. `layout` (default: `serving_layout`) lies over all its devices;
    `looped`: long steps with prompts are sent in chunks beside their products. `laid`: see `block_work`.

    Raises CapacityError if the model cannot be cut over the devices.
    """

    def __init__(
        self,
        d: Dimensions,
        machine: Machine,
        formats: Formats = BF16,
        layout: Layout | None = None,
        looped: bool = False,
        laid: bool = False,
    ) -> None:
        self.machine, self.formats = machine, formats
        self.layout = layout or serving_layout(d, machine, formats)
        mesh = self.layout.mesh
        padded = padded_heads(d, mesh.size)
        assert padded is not None, "a layout's heads can be cut"
        self.d = padded
        c, layers = machine.constants, padded.layers
        topology = machine.networks[0].topology if machine.networks else "switch"
        unit = block_work(padded, self.layout, "", topology, laid)
        self.tensor = unit.tensor
        peak, bandwidth = machine.flops(formats.compute), machine.device.bandwidth.value
        self._peak, self._bandwidth = peak, bandwidth
        # Seconds per FLOP and per byte, in products and in attention.
        self._flop, self._byte = 1 / (peak * c.matmul.value), 1 / (bandwidth * c.hbm.value)
        self._attention_flop = 1 / (peak * c.attention_matmul.value)
        self._attention_byte = 1 / (bandwidth * c.attention_hbm.value)
        # Per layer: what grows with the tokens, and what does not.
        self._token_flops = unit.flops * layers
        self._weight_bytes = unit.weight_elements * formats.weight_bytes * layers
        self._token_bytes = 2 * unit.activation_elements * layers
        # The first layer's weights are waited for, the others' come while a layer is computed.
        gathering = unit.weights.seconds(machine, formats.weight_bytes, 1.0, mesh.size)
        self._gathers = gathering * (layers - 1) * machine.ranks.gather_overlap.value
        self._awaited = gathering * layers - self._gathers
        small, *larger = unit.activations.spans(machine, 2.0, mesh.size)
        loops = loop_price(unit.loops, machine, self._flop, mesh.size, layers)
        parts = parts_price(padded, unit, machine)
        # Per position attended to or read, all layers.
        self._attended_flops = 4 * unit.query_elements * layers
        cut = mesh.count(self.layout.batch_axes) * mesh.count(self.layout.kv_axes(padded.kv_heads))
        self._resident_bytes = padded.kv_elements() * formats.kv_bytes * layers / cut
        self._eager = unit.host_launches(machine) * layers
        self._launches = unit.device_launches(machine, formats.weight_bytes) * layers + c.step_seconds.value
        elements = padded.head_elements / mesh.size
        self._sampled_flops, self._head_bytes = 2 * elements, formats.table_bytes * elements
        self.cost = StepCost(
            token_flops=self._token_flops * self._flop,
            token_bytes=self._token_bytes * self._byte,
            weights=self._weight_bytes * self._byte,
            attended=self._attended_flops * self._attention_flop,
            resident=self._resident_bytes * self._attention_byte,
            sampled=self._sampled_flops * self._flop,
            head=self._head_bytes * self._byte,
            launches=self._launches,
            eager=self._eager,
            gathers=self._gathers,
            unhidden=1 - c.product_overlap.value,
            talk=small.fixed * layers + self._awaited,
            token_talk=small.each * layers,
            talk_spans=tuple((s.above, s.fixed * layers + self._awaited, s.each * layers) for s in larger),
            loop_cut=mesh.count(self.layout.gather) if looped and not unit.boxes(machine) else 0,
            loop_hidden=loops.hidden,
            loop_chunk=loops.chunk,
            loop_weights=loops.weight_elements * formats.weight_bytes * self._byte,
            windows=padded.windows,
            captured=unit.captured,
            part_least=0 if parts is None else parts.sizes.least,
            part_most=0 if parts is None else parts.sizes.most,
            part_copying=0.0 if parts is None else parts.copying * layers,
            part_adding=0.0 if parts is None else parts.adding * layers,
        )

    def work(self, start: Positions, stop: Positions, sampled: int) -> StepWork:
        """The counts of a step of this model."""
        return step_work(start, stop, sampled, self.d.windows)

    def decodes(self, stop: Positions) -> StepWork:
        """The counts of a step of decodes alone, each at the last of `stop` positions; all are sampled."""
        if self.d.windows:
            return step_work(stop - 1, stop, len(stop), self.d.windows)._replace(prompts=False)
        resident = sum(stop.tolist())  # of some tens of rows: NumPy's own sum takes ten times as long
        return StepWork(len(stop), len(stop), resident, resident, False, len(stop))

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step; the sum of `timeline`, without making one."""
        return self.cost.seconds(work)

    def timeline(self, work: StepWork) -> Timeline:
        """Busy channels of a step, with their bounds at peak rates."""
        reached = (self._flop, self._byte)
        attended = (self._attended_flops * work.attended, self._resident_bytes * work.resident)
        c = self.machine.constants
        products = self._on_device(self._token_flops * work.tokens, self._products_bytes(work), *reached)
        groups = [
            Group("products", products),
            Group("unhidden", unhidden(c, products)),
            Group("attention", self._on_device(*attended, self._attention_flop, self._attention_byte)),
            Group("launches", (Channel("launches", self._launches),)),
        ]
        beside, parts = [], self.cost.parts(work.tokens)
        if self._awaited:
            beside.append(Channel("weight gathers", self._gathers))
            groups.append(Group("awaited gathers", (Channel("weight gathers", self._awaited),)))
        hidden, more = self.cost.looped(work)
        if hidden:
            beside.append(Channel("collectives", hidden))
        groups[0] = Group("products", (*products, *beside))
        exposed = self.cost.talked(work.tokens) - self._awaited + more - hidden
        if parts > 1:
            busy = sum(group.seconds for group in groups[:3])
            exposed = self.cost.part_adding * work.tokens
            exposed += max(0.0, self.cost.part_copying * work.tokens - busy)
        if exposed:
            groups.append(Group("collectives", (Channel("collectives", exposed),)))
        if work.sampled:
            head = self._on_device(self._sampled_flops * work.sampled, self._head_bytes, *reached)
            groups += [Group("head", head), Group("unhidden", unhidden(c, head))]
        waits = parts * self._eager - sum(group.seconds for group in groups)
        if (work.prompts or not self.cost.captured) and waits > 0:
            groups.append(Group("launching", (Channel("launches", waits),)))
        return Timeline(tuple(groups))

    def _products_bytes(self, work: StepWork) -> float:
        again = (self.cost.chunks(work) - 1) * self.cost.loop_weights / self._byte
        return self.cost.parts(work.tokens) * self._weight_bytes + again + self._token_bytes * work.tokens

    def _on_device(self, flops: float, nbytes: float, flop: float, byte: float) -> tuple[Channel, Channel]:
        return (
            Channel("compute", flops * flop, flops, "FLOP", flops / self._peak),
            Channel("device memory", nbytes * byte, nbytes, "bytes", nbytes / self._bandwidth),
        )


def serving_layout(d: Dimensions, machine: Machine, formats: Formats = BF16) -> Layout:
    """The layout over all devices in which a typical decode is fastest; weights stay where they are.

    A step that mixes prompts and decodes has one layout, and gathering weights for a few tokens is never worth it.
    Raises CapacityError if the heads cannot be cut over the devices.
    """
    count = machine.num_devices
    if count == 1:
        return Layout(Mesh())
    batch, context = TYPICAL
    found = [
        choice
        for choice in choices(d, machine, count, Work(-(-batch // count) * count, 1, context), formats)
        if not choice.layout.gather
    ]
    if not found:
        raise CapacityError(
            f"the {d.heads} heads, {d.kv_heads} heads of K and V and {d.mlp} columns of {d.name} cannot be cut over "
            f"{count} devices; take a number that divides them."
        )
    return min(found, key=lambda choice: choice.timeline.seconds).layout


def kv_room(prices: StepPrices, utilization: float, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Tokens of KV cache that weights and the buffers of the largest step leave room for.

    `utilization` is the share of a device's memory that all of it may take. Raises CapacityError if nothing is left.
    """
    d, machine, devices = prices.d, prices.machine, prices.layout.mesh.size
    weights = resident_bytes(d, prices.formats, devices, 1)
    if prices.tensor:
        weights += repeated_bytes(d, prices.formats, prices.layout)
    buffers = working_bytes(d, max_num_batched_tokens, devices) + logits_bytes(d, max_num_seqs, devices)
    allowed = machine.device.capacity.value * utilization
    if weights + buffers >= allowed:
        gib = 2**30
        raise CapacityError(
            f"the weights ({weights / gib:.1f} GiB a device) and the buffers of a step ({buffers / gib:.1f} GiB) do "
            f"not fit the {allowed / gib:.1f} GiB of {machine.name} that may be used; take more devices, a smaller "
            "format or a smaller model."
        )
    # A layout that repeats K and V on several chips has room for fewer of them.
    return int((allowed - weights - buffers) / kv_bytes_per_chip(d, prices.layout, 1, 1, prices.formats))


def chunk_costs(prices: StepPrices, chunk_size: int, max_context: int) -> dict[int, float]:
    """Seconds that a chunk adds to a large step, at contexts that are powers of two (Pensieve §3.4.3.1, `Cost`)."""
    cost = prices.cost
    contexts = [2**k for k in range(max_context.bit_length() + 1)]
    return {c: chunk_size * (cost.token_flops + cost.attended * c) for c in contexts}
