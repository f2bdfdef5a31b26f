"""What a step costs: operations with FLOPs and bytes, channels with busy seconds, and how channels overlap.

A model's layer is a few operations; a machine has channels (the device's matrix units, its memory, links, the host,
disks). A `Group` holds channels that work at the same time; groups follow one another. `estimate` is the sum over the
groups, each as its overlap says; `lower_bound` is what no order of the same work on these rates can beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from cellar.core.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The numbers of a model that a cost needs. E `embed`, F `mlp`, H `heads`, K `kv_heads`, D `head_dim`.

    `windows` are the layers' sliding windows (None: full); `parallel` says that attention and MLP share their input;
    `chunk` are the tokens of a chunk of the KV cache, its unit; `norm_sums` the numbers that a norm adds up per token:
    of squares (RMSNorm), and of what is normed, too (LayerNorm).
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
    chunk: int = 32
    norm_sums: int = 1

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

    def chunks(self, tokens: int) -> int:
        """Chunks that hold the K and V of one sequence of so many tokens."""
        return -(-tokens // self.chunk)

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
        chunk=spec.kv.chunk_size,
        norm_sums=2 if spec.options.get("norm_mean", False) else 1,
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


def product_flops(d: Dimensions, tokens: float, sampled: float) -> float:
    """FLOPs of a model's products for so many tokens, of which `sampled` get logits; none for attention or lookups."""
    return 2 * (tokens * d.layers * d.layer_elements + sampled * d.head_elements)


def flops_utilization(flops: float, seconds: float, devices: int, peak: float) -> float:
    """MFU: the share of the devices' peak that `flops` in `seconds` are."""
    return flops / (seconds * devices * peak)
