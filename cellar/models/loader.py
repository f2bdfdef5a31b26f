"""Weights of a model: from a checkpoint, or random ones made from the specs alone.

Loading goes tensor by tensor, each put together in the run's dtype on its device: what is in memory at any
moment is the weights so far and the tensor at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import HeadRows, ModelSpec, Region, StoredPart, TensorSpec
from cellar.models.checkpoint import Checkpoint
from cellar.models.quantization import module_of
from cellar.models.quantized import Get, quantized_reader
from cellar.models.random import fill_random, key_of
from cellar.models.readers import PLAIN
from cellar.ops.linear.definition import as_linear
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.quant.matrix import Quantized, empty_quantized, quantized, stacked
from cellar.quant.weight import QuantizedWeight, StackedWeight

Make = Callable[[TensorSpec], Weight]
"""A tensor, whole and in its format, by its spec."""

Transform = Callable[[TensorSpec, Weight], Weight]
"""What the run makes of a tensor, or of a matrix that is quantized already."""

# Tensors of old checkpoints that follow from config.json: frequencies of the rotary embedding, a format version.
_HARMLESS = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$|^(model\.)?decoder\.version$")
# Scales of activations and of the KV cache, which keep the run's dtype.
_UNUSED_SCALE = re.compile(r"\.(input|output|q|k|v|attn)_(scale|zero_point)$|\.(input|output)_global_scale$")


@dataclass(frozen=True)
class LoadedWeights:
    """The arguments `weights` of a model's functions: of `embed`, of each `layer`, and of `head`."""

    embedding: dict[str, Weight]
    layers: list[dict[str, Weight]]
    head: dict[str, Weight]


def load(
    spec: ModelSpec, directory: Path, device: torch.device | str = "cpu", transform: Transform | None = None
) -> LoadedWeights:
    """Read a checkpoint's weights in the dtype of `spec`.

    `transform(tensor_spec, weight)` is applied to each tensor as soon as it is there, e.g. to pack it, and the
    original is freed before the next is read; a quantized matrix is a weight already. A tied head is the very tensor of
    the embedding unless `transform` changes it. Raises CheckpointError if files or tensors are missing, damaged, of
    another shape, or too many.
    """
    return assembled(spec, reader(spec, directory, device), transform)


def reader(spec: ModelSpec, directory: Path, device: torch.device | str = "cpu") -> Make:
    """What reads the tensors of a checkpoint one by one, after all of them were found. Raises CheckpointError."""
    checkpoint = Checkpoint(directory)
    sources = _sources(spec, checkpoint)
    kind = torch.device(device)

    def make(tensor: TensorSpec) -> Weight:
        if any(part.format.layout != "plain" for part in tensor.stored_parts()):
            return _read_quantized(tensor, sources, checkpoint, kind)
        return _quantized(tensor, lambda wanted: _joined(wanted, sources, checkpoint, kind))

    return make


def dummy(
    spec: ModelSpec, device: torch.device | str = "cpu", seed: int = 0, transform: Transform | None = None
) -> LoadedWeights:
    """Random weights in the dtype of `spec`, a function of seed, tensor, row and column: a shard's are the whole's.

    Matrices keep the scale of what they multiply (deviation in^-1/2), norms are 1, biases small: activations
    stay finite in every dtype.
    """
    return assembled(spec, dummy_reader(device, seed), transform)


def dummy_reader(device: torch.device | str = "cpu", seed: int = 0) -> Make:
    """What makes the tensors of `dummy` one by one."""
    kind = torch.device(device)
    return lambda tensor: _quantized(tensor, lambda wanted: _random(wanted, seed, kind))


def assembled(spec: ModelSpec, make: Make, transform: Transform | None = None) -> LoadedWeights:
    """Make all tensors: embedding, each layer, head; `transform` as in `load`."""

    def changed(tensor: TensorSpec, weight: Weight) -> Weight:
        return weight if transform is None else transform(tensor, weight)

    def made(tensors: Iterable[TensorSpec]) -> dict[str, Weight]:
        return {tensor.name: changed(tensor, make(tensor)) for tensor in tensors}

    tables = {tensor.name: make(tensor) for tensor in spec.embedding}
    embedding = {tensor.name: changed(tensor, tables[tensor.name]) for tensor in spec.embedding}
    layers = [made(layer.tensors) for layer in spec.layers]
    head = made(tensor for tensor in spec.head if not (spec.tied_head and tensor.name == "lm_head"))
    if spec.tied_head:
        tied = next(tensor for tensor in spec.head if tensor.name == "lm_head")
        head["lm_head"] = changed(tied, tables["embed"])
    return LoadedWeights(embedding, layers, head)


def meta_reader(tensor: TensorSpec) -> Weight:
    """A tensor without memory, in its formats: what a list of kernels needs of it."""
    device = torch.device("meta")
    if not tensor.formats:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
    found: list[Quantized | Tensor] = []
    for region in tensor.regions():
        format = tensor.formats[region.part]
        shape = (len(region.rows), tensor.shape[1])
        plain = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=device)
        found.append(empty_quantized(format, shape, device) if format.is_quantized else plain)
    return _stack(found)


def _quantized(tensor: TensorSpec, read: Callable[[TensorSpec], Tensor]) -> Weight:
    """A matrix in the formats that the parts of its spec have; as it is where they are plain.

    Where all of a row shares a scale, some columns of it get the scale that the whole row has: a shard is the whole's.
    """
    if not tensor.formats:
        return read(tensor)
    columns = tensor.regions()[0].columns
    if columns is not None and any(format.is_quantized and not format.group for format in tensor.formats):
        whole = _numbers(_with_all_columns(tensor, columns), read)
        return whole.slice(1, columns)
    return _numbers(tensor, read)


def _with_all_columns(tensor: TensorSpec, columns: range) -> TensorSpec:
    """The same rows of all columns, and of those past the end that `columns` has."""
    assert tensor.cut is not None
    width = max(tensor.cut.shape[1], columns.stop)
    regions = tuple(replace(region, columns=range(width)) for region in tensor.cut.regions)
    return replace(tensor, shape=(tensor.shape[0], width), cut=replace(tensor.cut, regions=regions))


def _numbers(tensor: TensorSpec, read: Callable[[TensorSpec], Tensor]) -> LinearWeight:
    matrix, regions = read(tensor), tensor.regions()
    rows = matrix.split_with_sizes([len(region.rows) for region in regions])
    return _stack(
        [
            quantized(piece, tensor.formats[region.part]) if tensor.formats[region.part].is_quantized else piece
            for piece, region in zip(rows, regions, strict=True)
        ]
    )


def _read_quantized(
    tensor: TensorSpec, names: Mapping[str, str], checkpoint: Checkpoint, device: torch.device
) -> LinearWeight:
    """The stored regions, each in its own format."""
    found: list[Quantized | Tensor] = []
    parts = tensor.stored_parts()
    for region in tensor.regions():
        part = parts[region.part]
        if part.format.is_quantized:
            get = _getter(module_of(part.name), names, checkpoint, device)
            found.append(quantized_reader(part).read(part, region, get))
            continue
        columns = part.shape[1] if region.columns is None else len(region.columns)
        piece = torch.empty((len(region.rows), columns), dtype=getattr(torch, tensor.dtype), device=device)
        there, inside = _inside(part, region, piece)
        PLAIN.read(checkpoint, names[part.name], there, inside, transposed=tensor.transposed)
        found.append(piece)
    return _stack(found)


def _stack(parts: Sequence[Quantized | Tensor]) -> LinearWeight:
    """One weight of these rows: one matrix where all have one format."""
    same = [part for part in parts if isinstance(part, Quantized)]
    whole = stacked(same) if len(same) == len(parts) else None
    if whole is not None:
        return QuantizedWeight(whole)
    return StackedWeight([QuantizedWeight(p) if isinstance(p, Quantized) else as_linear(p) for p in parts])


def _getter(module: str, names: Mapping[str, str], checkpoint: Checkpoint, device: torch.device) -> Get:
    def get(suffix: str, rows: range | None, columns: range | None) -> Tensor | None:
        name = names.get(module + suffix)
        if name is None:
            return None
        blocks = [block for _, block in checkpoint.read(name, rows, columns)]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0].clone()).to(device)

    return get


def _joined(tensor: TensorSpec, names: Mapping[str, str], checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """The stored regions under one another, in the dtype and on the device of the run."""
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
    parts, regions = tensor.stored_parts(), tensor.regions()
    for target, region in zip(whole.split_with_sizes([len(r.rows) for r in regions]), regions, strict=True):
        name = names[parts[region.part].name]
        there, inside = _inside(parts[region.part], region, target)
        PLAIN.read(checkpoint, name, there, inside, transposed=tensor.transposed)
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
    whole = tensor.shape if tensor.cut is None else tensor.cut.shape
    is_matrix = len(whole) == 2
    every = range(whole[1] if is_matrix else 1)
    deviation = whole[1] ** -0.5 if is_matrix else 0.02
    parts, regions = tensor.stored_parts(), tensor.regions()
    for target, region in zip(made.split_with_sizes([len(r.rows) for r in regions]), regions, strict=True):
        key = key_of(seed, parts[region.part].name)
        there, inside = _inside(parts[region.part], region, target)
        fill_random(inside if is_matrix else inside[:, None], key, there.rows, there.columns or every, deviation)
    if tensor.heads is not None:
        _reorder(made, tensor.heads)
    return made


def _inside(part: StoredPart, region: Region, target: Tensor) -> tuple[Region, Tensor]:
    """What of a region the part has, and where in `target` that goes; the rest of `target` is made zero."""
    rows = range(min(region.rows.start, part.shape[0]), min(region.rows.stop, part.shape[0]))
    columns = region.columns
    if columns is not None:
        columns = range(min(columns.start, part.shape[1]), min(columns.stop, part.shape[1]))
    if rows == region.rows and columns == region.columns:
        return region, target
    target.zero_()
    inside = target[: len(rows)] if columns is None else target[: len(rows), : len(columns)]
    return Region(region.part, rows, columns), inside


def _sources(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the specs -> name in the checkpoint, for every stored tensor, each of the right shape and type."""
    found: dict[str, str] = {}
    tied = _tied(spec)
    for tensor in spec.tensors():
        for part in tensor.stored_parts():
            if part.format.layout != "plain":
                found |= _check_quantized(checkpoint, part)
                continue
            name = _name_in(checkpoint, part.name)
            if name is None and part.name == tied:
                name = _name_in(checkpoint, "lm_head.weight")
            if name is None:
                raise CheckpointError(
                    f"{checkpoint.directory} has no tensor {part.name}, which its config.json calls for; get both "
                    "again."
                )
            PLAIN.check(checkpoint, name, part, transposed=tensor.transposed)
            found[part.name] = name
    extra = {name for name in checkpoint.tensors if not _HARMLESS.search(name)} - set(found.values())
    extra -= _elsewhere(spec, extra)
    if any(tensor.formats for tensor in spec.tensors()):
        extra = {name for name in extra if not _is_needless(checkpoint, name)}
    if tied is not None and "lm_head.weight" in extra:
        _check_equal(checkpoint, found[tied], "lm_head.weight")
        extra.remove("lm_head.weight")
    if extra:
        raise CheckpointError(
            f"{checkpoint.directory} has {len(extra)} tensors that model_type {spec.model_type} does not use, such as "
            f"{min(extra)}; check that config.json belongs to these weights."
        )
    return found


def _check_quantized(checkpoint: Checkpoint, part: StoredPart) -> dict[str, str]:
    """What a module's tensors are called in the checkpoint, each of the right shape and type."""
    found: dict[str, str] = {}
    for expected in quantized_reader(part).tensors(part):
        stored = module_of(part.name) + expected.suffix
        name = _name_in(checkpoint, stored)
        if name is None:
            if expected.optional:
                continue
            raise CheckpointError(
                f"{checkpoint.directory} has no tensor {stored}, which its quantization config calls for; check that "
                "both belong together."
            )
        there = checkpoint.tensors[name]
        if there.shape not in expected.shapes or there.dtype not in expected.dtypes:
            shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
            raise CheckpointError(
                f"{name} in {there.file} is {there.dtype} {list(there.shape)}, but the quantization config calls for "
                f"{' or '.join(expected.dtypes)} {shapes}; check that both belong together."
            )
        found[stored] = name
    return found


def _is_needless(checkpoint: Checkpoint, name: str) -> bool:
    """Scales of what is not quantized here, and the biases of zeros that some tools write for every module."""
    if _UNUSED_SCALE.search(name):
        return True
    return name.endswith(".bias") and all(not bool(block.any()) for _, block in checkpoint.read(name))


def _tied(spec: ModelSpec) -> str | None:
    """The stored embedding, if it is the head, too: in memory (`tied_head`), or in the checkpoint alone, as for a
    shard, or for a stage that has one of them, while another has the other.
    """
    both = [tensor.stored[0] for tensor in (*spec.embedding[:1], *spec.head) if tensor.name in ("embed", "lm_head")]
    return next((name for k, name in enumerate(both) if name in spec.elsewhere or name in both[:k]), None)


def _elsewhere(spec: ModelSpec, names: set[str]) -> set[str]:
    """Those of a checkpoint's tensors that other ranks read: by their names, or as parts of a quantized module."""
    stored = {name for one in spec.elsewhere for name in (one, one.removeprefix("model."))}
    modules = {module_of(one) for one in stored if one.endswith(".weight")}
    return {name for name in names if name in stored or name.rpartition(".")[0] in modules}


def _name_in(checkpoint: Checkpoint, stored: str) -> str | None:
    """The name as it is, or without its leading `model.` (a checkpoint of the model without its head)."""
    return next((name for name in (stored, stored.removeprefix("model.")) if name in checkpoint.tensors), None)


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
