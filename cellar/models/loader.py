"""Weights of a model: from a checkpoint, or random ones made from the specs alone.

Loading goes tensor by tensor, each put together in the run's dtype on its device: what is in memory at any
moment is the weights so far and the tensor at hand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, ModelSpec, TensorSpec
from cellar.models.checkpoint import FLOATS, Checkpoint

Transform = Callable[[TensorSpec, Tensor], Tensor]

# Tensors of old checkpoints that follow from config.json: frequencies of the rotary embedding, a format version.
_HARMLESS = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$|^(model\.)?decoder\.version$")


@dataclass(frozen=True)
class LoadedWeights:
    """The arguments `weights` of a model's functions: of `embed`, of each `layer`, and of `head`."""

    embedding: dict[str, Tensor]
    layers: list[dict[str, Tensor]]
    head: dict[str, Tensor]


def is_linear(tensor: TensorSpec) -> bool:
    """True for a matrix that `linear` multiplies by (and that may be packed), false for tables, norms and biases."""
    return len(tensor.shape) == 2 and tensor.name not in ("embed", "positions")


def load(
    spec: ModelSpec, directory: Path, device: torch.device | str = "cpu", transform: Transform | None = None
) -> LoadedWeights:
    """Read a checkpoint's weights in the dtype of `spec`.

    `transform(tensor_spec, tensor)` is applied to each tensor as soon as it is there, e.g. to pack it, and the
    original is freed before the next is read. A tied head is the very tensor of the embedding unless `transform`
    changes it. Raises CheckpointError if files or tensors are missing, damaged, of another shape, or too many.
    """
    checkpoint = Checkpoint(directory)
    sources = _sources(spec, checkpoint)
    kind = torch.device(device)

    def make(tensor: TensorSpec) -> Tensor:
        return _joined(tensor, [sources[stored] for stored in tensor.stored], checkpoint, kind)

    return _assembled(spec, make, transform)


def dummy(
    spec: ModelSpec, device: torch.device | str = "cpu", seed: int = 0, transform: Transform | None = None
) -> LoadedWeights:
    """Random weights in the dtype of `spec`, a function of seed, tensor and kind of device.

    Matrices keep the scale of what they multiply (deviation in^-1/2), norms are 1, biases small: activations
    stay finite in every dtype.
    """
    kind = torch.device(device)

    return _assembled(spec, lambda tensor: _random(tensor, seed, kind), transform)


def _assembled(spec: ModelSpec, make: Callable[[TensorSpec], Tensor], transform: Transform | None) -> LoadedWeights:
    """Make all tensors: embedding, each layer, head."""
    change = transform or (lambda _, tensor: tensor)

    def made(tensors: Iterable[TensorSpec]) -> dict[str, Tensor]:
        return {tensor.name: change(tensor, make(tensor)) for tensor in tensors}

    embedding = made(spec.embedding)
    layers = [made(layer.tensors) for layer in spec.layers]
    head = made(tensor for tensor in spec.head if not (spec.tied_head and tensor.name == "lm_head"))
    if spec.tied_head:
        tied = next(tensor for tensor in spec.head if tensor.name == "lm_head")
        head["lm_head"] = change(tied, embedding["embed"])
    return LoadedWeights(embedding, layers, head)


def _joined(tensor: TensorSpec, names: list[str], checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """The stored parts under one another, in the dtype and on the device of the run."""
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
    for part, name in zip(whole.split_with_sizes(list(_parts(tensor))), names, strict=True):
        target = part.T if tensor.transposed else part
        for first, block in checkpoint.read(name):
            target[first : first + len(block)].copy_(block.to(device))
    if tensor.heads is not None:
        _reorder(whole, tensor.heads)
    return whole


def _reorder(whole: Tensor, rows: HeadRows) -> None:
    """Turn q, k, v as stored into q, then k, then v, with rotary halves; in place."""
    heads = whole.view(-1, rows.head_dim, *whole.shape[1:])
    if rows.by_head:
        heads.copy_(torch.cat([heads[part::3] for part in range(3)]))
    rotated = heads[: rows.num_heads + rows.num_kv_heads, : rows.interleaved]
    rotated.copy_(torch.cat((rotated[:, 0::2], rotated[:, 1::2]), dim=1))


def _random(tensor: TensorSpec, seed: int, device: torch.device) -> Tensor:
    made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
    if tensor.name.endswith("norm"):
        return made.fill_(1.0)
    key = f"{seed} {tensor.name} {' '.join(tensor.stored)}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    generator = torch.Generator(device).manual_seed(number)
    deviation = tensor.shape[-1] ** -0.5 if len(tensor.shape) == 2 else 0.02
    return made.normal_(0.0, deviation, generator=generator)


def _parts(tensor: TensorSpec) -> tuple[int, ...]:
    """Rows of each stored tensor."""
    return tensor.parts or (tensor.shape[0] // len(tensor.stored),) * len(tensor.stored)


def _sources(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the specs -> name in the checkpoint, for every stored tensor, each of the right shape and type."""
    found: dict[str, str] = {}
    for tensor in spec.tensors():
        for stored, rows in zip(tensor.stored, _parts(tensor), strict=True):
            name = _name_in(checkpoint, stored)
            if name is None and spec.tied_head and stored == spec.embedding[0].stored[0]:
                name = _name_in(checkpoint, "lm_head.weight")
            if name is None:
                raise CheckpointError(
                    f"{checkpoint.directory} has no tensor {stored}, which its config.json calls for; get both again."
                )
            _check(checkpoint, name, (rows, *tensor.shape[1:]), tensor.transposed)
            found[stored] = name
    extra = {name for name in checkpoint.tensors if not _HARMLESS.search(name)} - set(found.values())
    if spec.tied_head and "lm_head.weight" in extra:
        _check_equal(checkpoint, found[spec.embedding[0].stored[0]], "lm_head.weight")
        extra.remove("lm_head.weight")
    if extra:
        raise CheckpointError(
            f"{checkpoint.directory} has {len(extra)} tensors that model_type {spec.model_type} does not use, such as "
            f"{min(extra)}; check that config.json belongs to these weights."
        )
    return found


def _name_in(checkpoint: Checkpoint, stored: str) -> str | None:
    """The name as it is, or without its leading `model.` (a checkpoint of the model without its head)."""
    return next((name for name in (stored, stored.removeprefix("model.")) if name in checkpoint.tensors), None)


def _check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], transposed: bool) -> None:
    there = checkpoint.tensors[name]
    if there.dtype not in FLOATS:
        raise CheckpointError(
            f"{name} in {there.file} is stored as {there.dtype}, but only {', '.join(FLOATS)} are read; "
            "use a checkpoint that is not quantized."
        )
    wanted = shape[::-1] if transposed else shape
    if there.shape != wanted:
        raise CheckpointError(
            f"{name} in {there.file} has shape {list(there.shape)}, but config.json calls for {list(wanted)}; "
            "check that they belong together."
        )


def _check_equal(checkpoint: Checkpoint, embed: str, head: str) -> None:
    """A tied head that is stored all the same must be the embedding."""
    one, other = checkpoint.tensors[embed], checkpoint.tensors[head]
    same = (one.shape, one.dtype) == (other.shape, other.dtype) and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(checkpoint.read(embed), checkpoint.read(head), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"{checkpoint.directory} has a {head} that differs from {embed}, but config.json ties them; "
            "set tie_word_embeddings to false."
        )
