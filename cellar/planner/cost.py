"""What a step costs: operations with FLOPs and bytes, channels with busy seconds, and how channels overlap.

A model's layer is a few operations; a machine has channels (the device's matrix units, its memory, links, the host,
disks). A `Group` holds channels that work at the same time; groups follow one another. `estimate` is the sum over the
groups, each as its overlap says; `lower_bound` is what no order of the same work on these rates can beat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cellar.core.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The numbers of a model that a cost needs. E `embed`, F `mlp`, H `heads`, K `kv_heads`, D `head_dim`.

    `windows` are the layers' sliding windows (None: full); `parallel` says that attention and MLP share their input.
    """

    name: str
    layers: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    parallel: bool
    tied: bool
    windows: tuple[int | None, ...] = ()

    @property
    def attention_elements(self) -> int:
        """Elements of the matrices of Q, K, V and output of one layer."""
        return self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_elements(self) -> int:
        """Elements of the matrices of one layer's MLP."""
        return (3 if self.gated else 2) * self.embed * self.mlp

    @property
    def layer_elements(self) -> int:
        """Elements of one layer's matrices; norms and biases, under a thousandth of it, are left out."""
        return self.attention_elements + self.mlp_elements

    @property
    def head_elements(self) -> int:
        """Elements of the matrix that gives the logits."""
        return self.embed * self.vocab

    @property
    def table_elements(self) -> int:
        """Elements of the embedding table, if it is not the head's."""
        return 0 if self.tied else self.head_elements

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return self.layers * self.layer_elements + self.head_elements + self.table_elements

    def kv_elements(self) -> int:
        """Elements of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def seen(self, context: float) -> float:
        """Tokens that a layer attends to at this context, on average over the layers."""
        if not self.windows or all(w is None for w in self.windows):
            return context
        return sum(context if w is None else min(context, w) for w in self.windows) / len(self.windows)


def dimensions(spec: ModelSpec) -> Dimensions:
    """The dimensions of a spec; whether the MLP is gated is read off the sizes of a layer's matrices."""
    layer = spec.layers[0]
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = sum(t.size for t in layer.tensors if len(t.shape) == 2) - attention
    windows = tuple(one.window for one in spec.layers)
    return Dimensions(
        name=spec.model_type,
        layers=spec.num_layers,
        embed=spec.hidden_size,
        mlp=spec.intermediate_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab_size,
        gated=mlp >= 3 * spec.hidden_size * spec.intermediate_size,
        parallel=bool(spec.options.get("parallel_block", False)),
        tied=spec.tied_head,
        windows=windows if any(w is not None for w in windows) else (),
    )


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of a step on one device: FLOPs, and the bytes of weights, activations and KV that it touches."""

    name: str
    flops: float
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def nbytes(self) -> float:
        """All bytes that pass the device's memory."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


def layer_operations(
    d: Dimensions, batch: float, new: float, context: float, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> tuple[Operation, ...]:
    """Operations of one layer for `batch` sequences of `new` tokens that end at `context` tokens each.

    `weight_bytes` and `kv_bytes` are per element; activations have two bytes. A prompt's own tokens see half of
    themselves on average (causal), and what was before wholly.
    """
    tokens = batch * new
    seen = d.seen(context - (new - 1) / 2)
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    width = d.mlp * (2 if d.gated else 1)
    return (
        Operation(
            "qkv",
            2 * tokens * d.embed * (q + 2 * kv),
            d.embed * (q + 2 * kv) * weight_bytes,
            2 * tokens * (d.embed + q + 2 * kv),
        ),
        Operation(
            "attention",
            4 * tokens * q * seen,
            0.0,
            4 * tokens * q,
            batch * (d.seen(context) + (new if new > 1 else 0)) * d.kv_elements() * kv_bytes,
        ),
        Operation("out", 2 * tokens * q * d.embed, q * d.embed * weight_bytes, 2 * tokens * (q + d.embed)),
        Operation("up", 2 * tokens * d.embed * width, d.embed * width * weight_bytes, 2 * tokens * (d.embed + width)),
        Operation("down", 2 * tokens * d.mlp * d.embed, d.mlp * d.embed * weight_bytes, 2 * tokens * (d.mlp + d.embed)),
    )


def head_operation(d: Dimensions, sampled: float, weight_bytes: float = 2.0) -> Operation:
    """The logits of `sampled` positions."""
    return Operation(
        "head",
        2 * sampled * d.head_elements,
        d.head_elements * weight_bytes,
        2 * sampled * (d.embed + 2 * d.vocab),
    )


def totals(operations: Iterable[Operation]) -> Operation:
    """The sum of operations."""
    listed = tuple(operations)
    return Operation(
        "total",
        sum(o.flops for o in listed),
        sum(o.weight_bytes for o in listed),
        sum(o.activation_bytes for o in listed),
        sum(o.kv_bytes for o in listed),
    )


@dataclass(frozen=True, slots=True)
class Channel:
    """One resource at work: `seconds` busy for `amount` of `unit` (FLOP or bytes). `bound`: seconds at its peak."""

    name: str
    seconds: float
    amount: float = 0.0
    unit: str = "bytes"
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Channels at work together. `overlap` 1: as long as the slowest; 0: one after another; linear in between."""

    name: str
    channels: tuple[Channel, ...]
    overlap: float = 1.0
    repeat: float = 1.0

    @property
    def seconds(self) -> float:
        """Time of the group, all repetitions."""
        busy = [c.seconds for c in self.channels]
        if not busy:
            return 0.0
        return self.repeat * (self.overlap * max(busy) + (1 - self.overlap) * sum(busy))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Groups that follow one another."""

    groups: tuple[Group, ...]

    @property
    def seconds(self) -> float:
        """The estimate."""
        return sum(g.seconds for g in self.groups)

    def busy(self) -> dict[str, float]:
        """Busy seconds of each channel over all groups."""
        found: dict[str, float] = {}
        for group in self.groups:
            for channel in group.channels:
                found[channel.name] = found.get(channel.name, 0.0) + group.repeat * channel.seconds
        return found

    @property
    def lower_bound(self) -> float:
        """Seconds that the busiest channel needs at its peak rate, all else hidden behind it and no latency."""
        found: dict[str, float] = {}
        for group in self.groups:
            for channel in group.channels:
                found[channel.name] = found.get(channel.name, 0.0) + group.repeat * channel.bound
        return max(found.values(), default=0.0)

    @property
    def binds(self) -> str:
        """The channel with the most busy seconds."""
        busy = self.busy()
        return max(busy, key=lambda name: busy[name]) if busy else "nothing"


def model_flops_utilization(parameters: float, tokens: float, seconds: float, devices: int, peak: float) -> float:
    """MFU as 004 counts it: 2 FLOPs a parameter and token, none for attention, over the peak of the 16-bit type."""
    return 2 * parameters * tokens / (seconds * devices * peak)
