"""What a model is, as data: its tensors, its layers, its KV cache. Sizes in bytes, work in FLOPs.

Placing, sharding, quantizing and loading are functions over these specs; so is every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cellar.core.dtypes import DTYPE_BYTES

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
class TensorSpec:
    """One logical tensor of a model.

    `name` is the key under which a layer's forward finds it (`qkv`). `axes` names each dimension
    (`("heads", "embed")`). `stored` are the names in the checkpoint, concatenated along dimension 0 in
    this order; empty means that the tensor is made (a tied head has its source's name here).
    `parts` are the rows that each of them has; empty means equal shares. `transposed` says that the stored
    matrix is [in, out] and is to be turned to [out, in]. `heads` says that the stored rows come in another order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    stored: tuple[str, ...] = ()
    transposed: bool = False
    parts: tuple[int, ...] = ()
    heads: HeadRows | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes at `dtype`."""
        return int(self.size * DTYPE_BYTES[self.dtype])


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

    def flops(self, num_tokens: int, context: int) -> int:
        """FLOPs of `num_tokens` new tokens that attend to `context` tokens each (2 per multiply-add)."""
        matrices = sum(t.size for t in self.tensors if len(t.shape) == 2)
        seen = context if self.window is None else min(context, self.window)
        return num_tokens * (2 * matrices + 4 * self.num_heads * self.head_dim * seen)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose cache is paged alike: same kind, heads and head dimension."""

    name: str
    kind: Literal["full", "window", "latent", "state"]
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    def nbytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers of the group."""
        return int(2 * len(self.layers) * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype])


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
    """A model as a checkpoint's config.json defines it, in the dtype it runs in."""

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
    options: Mapping[str, float | int | str | bool] = field(default_factory=dict)

    def tensors(self) -> Iterator[TensorSpec]:
        """All logical tensors, in the order in which a forward pass meets them."""
        yield from self.embedding
        for layer in self.layers:
            yield from layer.tensors
        yield from self.head

    def num_parameters(self) -> int:
        """Parameters; a tied head counts once."""
        return sum(t.size for t in self.tensors() if not (self.tied_head and t.name == "lm_head"))

    def nbytes(self) -> int:
        """Bytes of the weights in memory; a tied head counts once."""
        return sum(t.nbytes for t in self.tensors() if not (self.tied_head and t.name == "lm_head"))

    def flops(self, num_tokens: int, context: int, num_sampled: int) -> int:
        """FLOPs of a step of `num_tokens` tokens with `context` tokens behind each, `num_sampled` of them sampled."""
        head = 2 * sum(t.size for t in self.head if len(t.shape) == 2)
        entry = 2 * sum(t.size for t in self.embedding if len(t.shape) == 2 and t.axes[0] not in _TABLES)
        layers = sum(layer.flops(num_tokens, context) for layer in self.layers)
        return layers + num_tokens * entry + num_sampled * head

    def step_nbytes(self, contexts: int) -> int:
        """Fewest bytes that a decode step reads: all weights but the embedding tables, and `contexts` tokens of KV."""
        weights = sum(t.nbytes for t in self.tensors() if t not in self.embedding or t.axes[0] not in _TABLES)
        return weights + contexts * self.kv.nbytes_per_token()
