"""What a model is, as data: its tensors, its layers, its KV cache. Sizes in bytes, work in FLOPs.

Placing, sharding, quantizing and loading are functions over these specs; so is every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.formats import Format
from cellar.core.kv_formats import row_nbytes

# First axis of tensors of which a step reads a few rows only; all other matrices are multiplied by.
_TABLES = ("vocab", "position")


@dataclass(frozen=True, slots=True)
class HeadRows:
    """How a checkpoint stores the rows of q, k and v in one tensor, if not as q, then k, then v, with rotary halves.

    The first `interleaved` dimensions of each q and k head are stored as pairs (2i, 2i + 1) that are rotated together;
    in memory they are halves (i, i + interleaved / 2). `by_head`: the q, k and v of one head are stored together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    interleaved: int = 0
    by_head: bool = False


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored tensor, whole: its name, its shape as [out, in], how its elements are written."""

    name: str
    shape: tuple[int, ...]
    format: Format


@dataclass(frozen=True, slots=True)
class Region:
    """Rows, and columns unless all, of the stored part number `part`; ranges have a step of 1.

    What lies past the part's ends is zero: a piece may be filled up.
    """

    part: int
    rows: range
    columns: range | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """What a tensor that is a piece of another takes of it: the other's shape, and regions that stand behind one
    another in the piece. A cut is taken of what is stored, before anything is joined, reordered or packed.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor of a model.

    `name` is the key under which a layer's forward finds it (`qkv`). `axes` names each dimension: `vocab`, `position`,
    `embed`, `words`; in layers `qkv` and `heads` (rows of q, k and v; columns of what attention made), `gate_up` and
    `mlp` likewise. Sharding and placement cut along them (`units.py`).
    `stored` are the names in the checkpoint, concatenated along dimension 0 in
    this order; empty means that the tensor is made (a tied head has its source's name here).
    `parts` are the rows that each of them has; empty means equal shares. `formats` say how each is written; empty means
    plain numbers. `transposed` says that the stored
    matrix is [in, out] and is to be turned to [out, in]. `heads` says that the stored rows come in another order.
    `cut`: the tensor is a piece of the one that `stored`, `parts` and `formats` describe.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    stored: tuple[str, ...] = ()
    transposed: bool = False
    parts: tuple[int, ...] = ()
    heads: HeadRows | None = None
    formats: tuple[Format, ...] = ()
    cut: Cut | None = None

    def stored_parts(self) -> tuple[StoredPart, ...]:
        """What is stored; of a tensor that is made, itself."""
        shape = self.shape if self.cut is None else self.cut.shape
        count = len(self.parts) or len(self.stored) or 1
        rows = self.parts or (shape[0] // count,) * count
        names = self.stored or (self.name,) * count
        formats = self.formats or (Format(self.dtype),) * count
        return tuple(
            StoredPart(name, (n, *shape[1:]), format) for name, n, format in zip(names, rows, formats, strict=True)
        )

    def regions(self) -> tuple[Region, ...]:
        """What of it is taken, in order."""
        if self.cut is not None:
            return self.cut.regions
        return tuple(Region(p, range(part.shape[0])) for p, part in enumerate(self.stored_parts()))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: at `dtype`, or in the formats of its parts."""
        if not self.formats:
            return int(self.size * DTYPE_BYTES[self.dtype])
        whole, parts = range(self.shape[-1]), self.stored_parts()
        return sum(
            parts[r.part].format.nbytes((len(r.rows), len(r.columns or whole)) if len(self.shape) == 2 else self.shape)
            for r in self.regions()
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of a step: a product (named as its matrix is), an addition (a vector), or a layer's attention.

    `flops` count 2 per multiply-add, `nbytes` the weights that are read once, `kv_elements` those of K and V.
    """

    name: str
    flops: int
    nbytes: int = 0
    kv_elements: int = 0


def _operation(tensor: TensorSpec, num_tokens: int) -> Operation:
    """A matrix is multiplied by; what vectors add is not counted."""
    return Operation(tensor.name, 2 * num_tokens * tensor.size if len(tensor.shape) == 2 else 0, tensor.nbytes)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One repeated block of a model and the group of the KV cache that it writes."""

    index: int
    tensors: tuple[TensorSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    kv_group: str = "full"

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's weights."""
        return sum(t.nbytes for t in self.tensors)

    def operations(self, num_tokens: int, context: int) -> Iterator[Operation]:
        """What `num_tokens` new tokens that attend to `context` tokens each need of this layer, in order."""
        for tensor in self.tensors:
            yield _operation(tensor, num_tokens)
            if tensor.name == "qkv":
                seen = context if self.window is None else min(context, self.window)
                kv = 2 * self.num_kv_heads * self.head_dim * seen * num_tokens
                yield Operation("attention", 4 * num_tokens * self.num_heads * self.head_dim * seen, kv_elements=kv)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose cache is paged alike: same kind, heads and head dimension.

    `dtype`: the run's, or how K and V are quantized (`kv_formats.py`); it is part of every chunk's identity.
    """

    name: str
    kind: Literal["full", "window", "latent", "state"]
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of K, or of V, of one head and token, scales included."""
        return row_nbytes(self.dtype, self.head_dim)

    def nbytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers of the group."""
        return 2 * len(self.layers) * self.num_kv_heads * self.row_nbytes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of a model. `chunk_size` tokens of one sequence in all layers of a group are one chunk."""

    groups: tuple[KVGroup, ...]
    chunk_size: int = 32

    def nbytes_per_token(self) -> int:
        """Bytes of one token over all groups."""
        return sum(g.nbytes_per_token() for g in self.groups)

    def chunk_nbytes(self) -> int:
        """Bytes of one chunk over all groups."""
        return self.chunk_size * self.nbytes_per_token()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as a checkpoint asks for it; `scaling` is Hugging Face's dict, already checked."""

    head_dim: int
    rotary_dim: int
    theta: float
    kind: Literal["plain", "llama3", "linear", "yarn", "dynamic"] = "plain"
    scaling: Mapping[str, float] = field(default_factory=dict)
    max_position: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A model as a checkpoint's config.json defines it, in the dtype it runs in; or what one rank has of it.

    `elsewhere`: stored tensors of which other ranks have all.
    """

    model_type: str
    dtype: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    embedding: tuple[TensorSpec, ...]
    layers: tuple[LayerSpec, ...]
    head: tuple[TensorSpec, ...]
    kv: KVSpec
    rope: RopeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tied_head: bool = False
    elsewhere: frozenset[str] = frozenset()
    options: Mapping[str, float | int | str | bool] = field(default_factory=dict)

    @property
    def vector_size(self) -> int:
        """Numbers of one of its final hidden states: the width of what the head takes."""
        return next((tensor.shape[1] for tensor in self.head if tensor.name == "lm_head"), self.hidden_size)

    def tensors(self) -> Iterator[TensorSpec]:
        """All logical tensors, in the order in which a forward pass meets them."""
        yield from self.embedding
        for layer in self.layers:
            yield from layer.tensors
        yield from self.head

    def named_tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """All tensors under names that are their own: `embed`, `layers.7.qkv`, `lm_head` (but not a tied one)."""
        for t in self.embedding:
            yield t.name, t
        for layer in self.layers:
            for t in layer.tensors:
                yield f"layers.{layer.index}.{t.name}", t
        for t in self.head:
            if not (self.tied_head and t.name == "lm_head"):
                yield t.name, t

    @property
    def tables(self) -> tuple[TensorSpec, ...]:
        """Of the embedding what is only looked up, plain: of each a step reads as many rows as it has tokens."""
        return tuple(
            t
            for t in self.embedding
            if t.axes[0] in _TABLES and not t.formats and not (self.tied_head and t.name == "embed")
        )

    def num_parameters(self) -> int:
        """Parameters; a tied head counts once."""
        return sum(t.size for _, t in self.named_tensors())

    def nbytes(self) -> int:
        """Bytes of the weights in memory; a tied head counts once."""
        return sum(t.nbytes for _, t in self.named_tensors())

    def operations(self, num_tokens: int, context: int, num_sampled: int) -> Iterator[Operation]:
        """What a step of `num_tokens` tokens with `context` tokens behind each needs, `num_sampled` of them sampled.

        The one account of a model's work: FLOPs, bytes, prices and benchmarks are sums of it. Tables of which a step
        reads a few rows are left out; norms of the embedding and the head are there for their bytes.
        """
        for tensor in self.embedding:
            if tensor.axes[0] not in _TABLES:
                yield _operation(tensor, num_tokens)
        for layer in self.layers:
            yield from layer.operations(num_tokens, context)
        for tensor in self.head:
            yield _operation(tensor, num_sampled)

    def flops(self, num_tokens: int, context: int, num_sampled: int) -> int:
        """FLOPs of such a step."""
        return sum(operation.flops for operation in self.operations(num_tokens, context, num_sampled))

    def step_nbytes(self, contexts: int) -> int:
        """Fewest bytes that a decode step reads: all weights but the embedding tables, and `contexts` tokens of KV."""
        weights = sum(operation.nbytes for operation in self.operations(0, 0, 0))
        return weights + contexts * self.kv.nbytes_per_token()
