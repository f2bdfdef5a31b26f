"""A LayerContext for tests: keeps every layer's K and V as plain tensors and attends with one dense softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.core.specs import ModelSpec
from cellar.models.loader import LoadedWeights
from cellar.models.model import Comm, Model, run_layer
from cellar.models.points import whole
from cellar.ops.rotary import rope_table
from cellar.ops.rotary.definition import rotary_definition


class DenseContext:
    """One sequence. `positions` is set before each step; attention is in float32 over everything written so far."""

    def __init__(self, spec: ModelSpec, comm: Comm | None = None) -> None:
        self.spec = spec
        self.comm = comm
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.cos_sin = None if spec.rope is None else rope_table(spec.rope, torch.device("cpu"))
        self.k: list[Tensor] = [torch.zeros(0)] * spec.num_layers
        self.v: list[Tensor] = [torch.zeros(0)] * spec.num_layers

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Causal attention of the newest positions over all, or over the layer's window."""
        if rotate:
            assert self.cos_sin is not None
            q, k = rotary_definition(q, k, self.positions, self.cos_sin)
        self.k[j] = k.clone() if len(self.k[j]) == 0 else torch.cat((self.k[j], k))
        self.v[j] = v.clone() if len(self.v[j]) == 0 else torch.cat((self.v[j], v))
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (self.k[j], self.v[j]))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.spec.head_dim**-0.5
        distance = self.positions[:, None] - torch.arange(len(keys))
        seen = distance >= 0
        window = self.spec.layers[j].window
        if window is not None:
            seen &= distance < window
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype)


def logits_of(
    model: Model, weights: LoadedWeights, tokens: Tensor, pieces: list[int], comm: Comm | None = None
) -> Tensor:
    """Logits [tokens, vocab] of a sequence that is computed in steps of `pieces` tokens."""
    ctx = DenseContext(model.spec, comm)
    rows, start = [], 0
    for size in pieces:
        ctx.positions = torch.arange(start, start + size)
        h = model.embed(weights.embedding, tokens[start : start + size], ctx)
        for j, layer in enumerate(weights.layers):
            h = run_layer(model, j, layer, h, ctx)
        h = whole(h, comm)
        rows.append(model.head(weights.head, h, comm))
        start += size
    assert start == len(tokens)
    return torch.cat(rows)
