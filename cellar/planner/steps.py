"""What one step of the engine costs, whatever its mixture of prompt chunks and decodes: the simulator's clock.

The same prices as `partition.block_timeline`, which knows batches of equal sequences only: its seconds depend on four
counts (tokens, sampled rows, positions attended to, positions whose K and V are read), so a step of any composition has
a price as soon as its counts are known. A test holds the two equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import CapacityError
from cellar.planner.cost import Channel, Dimensions, Group, Timeline
from cellar.planner.layouts import Layout
from cellar.planner.machines import Machine
from cellar.planner.offload import logits_bytes, working_bytes
from cellar.planner.partition import BF16, Formats, Work, block_work, choices, kv_bytes_per_chip, padded_heads
from cellar.planner.resident import resident_bytes
from cellar.planner.sharding import Mesh

Positions = NDArray[np.integer]

TYPICAL = (32, 1024)
"""Sequences and context of the decode for which the layout over several devices is chosen."""


class StepWork(NamedTuple):
    """Counts of one step, positions averaged over the layers where some have windows.

    `attended` sums over the tokens the positions that each attends to, `resident` over the spans those whose K and V
    are read. `prompts` says that some tokens are a prompt's.
    """

    tokens: int
    sampled: int
    attended: float
    resident: float
    prompts: bool = False


def step_work(start: Positions, stop: Positions, sampled: int, windows: tuple[int | None, ...] = ()) -> StepWork:
    """The counts of spans [start, stop) of positions, prompts among them.

    `windows` are as in `Dimensions`: one for each layer, or none if all layers see everything.
    """
    a, b = start.astype(np.int64), stop.astype(np.int64)
    new = b - a
    tokens = int(new.sum())
    if not windows:
        return StepWork(tokens, sampled, float((new * (a + b + 1)).sum()) / 2, int(b.sum()), True)
    attended = resident = 0.0
    for window in set(windows):
        share = windows.count(window) / len(windows)
        limit = _ALL if window is None else window
        whole = np.clip(np.minimum(b, limit) - a, 0, None)  # tokens that see all that is before them
        attended += share * float((whole * (2 * a + whole + 1) / 2 + (new - whole) * limit).sum())
        resident += share * float(np.minimum(b, limit + new - 1).sum())
    return StepWork(tokens, sampled, attended, resident, True)


_ALL = 1 << 40  # a window that no context reaches


class StepPrices:
    """Seconds of steps of one model on one machine. `layout` (default: `serving_layout`) lies over all its devices.

    `dtype` is that of the products: a processor without an accelerator computes in float32. Raises CapacityError if the
    model cannot be cut over the devices.
    """

    def __init__(
        self,
        d: Dimensions,
        machine: Machine,
        formats: Formats = BF16,
        layout: Layout | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        self.machine, self.formats, self.dtype = machine, formats, dtype
        self.layout = layout or serving_layout(d, machine, formats)
        mesh = self.layout.mesh
        padded = padded_heads(d, mesh.size)
        assert padded is not None, "a layout's heads can be cut"
        self.d = padded
        c, layers = machine.constants, padded.layers
        unit = block_work(padded, self.layout, "", machine.networks[0].topology if machine.networks else "switch")
        peak, bandwidth = machine.flops(dtype), machine.device.bandwidth.value
        self._peak, self._bandwidth = peak, bandwidth
        # Seconds per FLOP and per byte, in products and in attention.
        self._flop, self._byte = 1 / (peak * c.matmul.value), 1 / (bandwidth * c.hbm.value)
        self._attention_flop = 1 / (peak * c.attention_matmul.value)
        self._attention_byte = 1 / (bandwidth * c.attention_hbm.value)
        # Per layer: what grows with the tokens, and what does not.
        self._token_flops = unit.flops * layers
        self._weight_bytes = unit.weight_elements * formats.weight_bytes * layers
        self._token_bytes = 2 * unit.activation_elements * layers
        self._gathers = unit.weights.seconds(machine, formats.weight_bytes, 1.0, mesh.size) * layers
        self._talk = unit.activations.seconds(machine, 2.0, 0.0, mesh.size) * layers
        self._token_talk = unit.activations.seconds(machine, 2.0, 1.0, mesh.size) * layers - self._talk
        # Per position attended to or read, all layers.
        self._attended_flops = 4 * unit.query_elements * layers
        cut = mesh.count(self.layout.batch_axes) * mesh.count(self.layout.kv_axes(padded.kv_heads))
        self._resident_bytes = padded.kv_elements() * formats.kv_bytes * layers / cut
        self._eager = c.eager_seconds.value * layers
        self._launches = c.layer_seconds.value * layers + c.step_seconds.value
        elements = padded.head_elements / mesh.size
        self._sampled_flops, self._head_bytes = 2 * elements, max(2.0, formats.weight_bytes) * elements

    def work(self, start: Positions, stop: Positions, sampled: int) -> StepWork:
        """The counts of a step of this model."""
        return step_work(start, stop, sampled, self.d.windows)

    def decodes(self, stop: Positions) -> StepWork:
        """The counts of a step of decodes alone, each at the last of `stop` positions; all are sampled."""
        if self.d.windows:
            return step_work(stop - 1, stop, len(stop), self.d.windows)._replace(prompts=False)
        resident = sum(stop.tolist())  # of some tens of rows: NumPy's own sum takes ten times as long
        return StepWork(len(stop), len(stop), resident, resident, False)

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step; the sum of `timeline`, without making one."""
        flop, byte = self._flop, self._byte
        products = max(
            self._token_flops * work.tokens * flop,
            (self._weight_bytes + self._token_bytes * work.tokens) * byte,
            self._gathers,
        )
        attention = max(
            self._attended_flops * work.attended * self._attention_flop,
            self._resident_bytes * work.resident * self._attention_byte,
        )
        head = max(self._sampled_flops * work.sampled * flop, self._head_bytes * byte) if work.sampled else 0.0
        found = products + attention + head + self._launches + self._talk + self._token_talk * work.tokens
        return max(found, self._eager) if work.prompts else found

    def timeline(self, work: StepWork) -> Timeline:
        """Busy channels of a step, with their bounds at peak rates."""
        reached = (self._flop, self._byte)
        attended = (self._attended_flops * work.attended, self._resident_bytes * work.resident)
        groups = [
            Group("products", self._on_device(self._token_flops * work.tokens, self._products_bytes(work), *reached)),
            Group("attention", self._on_device(*attended, self._attention_flop, self._attention_byte)),
            Group("launches", (Channel("launches", self._launches),)),
        ]
        if self._gathers:
            gathers = Channel("weight gathers", self._gathers)
            groups[0] = Group("products", (*groups[0].channels, gathers))
        if self._talk or self._token_talk:
            talk = Channel("collectives", self._talk + self._token_talk * work.tokens)
            groups.append(Group("collectives", (talk,)))
        if work.sampled:
            groups.append(
                Group("head", self._on_device(self._sampled_flops * work.sampled, self._head_bytes, *reached))
            )
        waits = self._eager - sum(group.seconds for group in groups)
        if work.prompts and waits > 0:
            groups.append(Group("launching", (Channel("launches", waits),)))
        return Timeline(tuple(groups))

    def _products_bytes(self, work: StepWork) -> float:
        return self._weight_bytes + self._token_bytes * work.tokens

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
