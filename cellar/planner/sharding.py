"""The sharding algebra of Pope et al. as data: which dimension of a tensor lies over which axes of the mesh.

A tensor is written `B_xLE_zy +x`: dimensions B, L, E; B cut over axis x, E over z then y (z the coarser), and the chips
along x hold partial sums. Collectives are functions from one such state to another; each has its exact volume, the
elements that every chip sends: for a group of k chips

    all-gather          (k - 1)/k of what a chip holds afterwards
    reduce-scatter      (k - 1)/k of what a chip held before
    all-reduce          both, one after the other; `sum` is one that tensor parallelism does at once
    all-to-all          (k - 1)/k of what a chip holds (before and after)
    slice               nothing: the chip keeps a part of what it has
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from cellar.core import collectives
from cellar.core.errors import ConfigError
from cellar.core.layouts import Mesh

_TERM = re.compile(r"([A-Z])(?:_([xyz]+))?")
_TENSOR = re.compile(r"((?:[A-Z](?:_[xyz]+)?)+)(?: \+([xyz]+))?")


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor's dimensions, the axes that cut each (coarsest first), and the axes over which it is a partial sum."""

    dims: str
    axes: tuple[str, ...]
    partial: str = ""

    @classmethod
    def parse(cls, text: str) -> Sharded:
        """Read `B_xLE_zy +x`. Raises ConfigError for what the notation does not allow."""
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a sharded tensor; write it as B_xLE_zy, partial sums as ' +x'.")
        terms = _TERM.findall(match[1])
        found = cls("".join(d for d, _ in terms), tuple(a for _, a in terms), match[2] or "")
        used = "".join(found.axes) + found.partial
        if len(set(used)) != len(used) or len(set(found.dims)) != len(found.dims):
            raise ConfigError(f"{text!r} uses an axis or a dimension twice; each may stand once.")
        return found

    def __str__(self) -> str:
        body = "".join(d + (f"_{a}" if a else "") for d, a in zip(self.dims, self.axes, strict=True))
        return body + (f" +{self.partial}" if self.partial else "")

    def of(self, dim: str) -> str:
        """Axes that cut a dimension."""
        return self.axes[self.dims.index(dim)]

    def with_axes(self, dim: str, axes: str) -> Sharded:
        """The same tensor with a dimension cut otherwise."""
        at = self.dims.index(dim)
        return replace(self, axes=(*self.axes[:at], axes, *self.axes[at + 1 :]))

    def local(self, sizes: Mapping[str, float], mesh: Mesh) -> float:
        """Elements that one chip holds."""
        product = 1.0
        for dim, axes in zip(self.dims, self.axes, strict=True):
            product *= sizes[dim] / mesh.count(axes)
        return product


class Kind(StrEnum):
    """The collectives."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    SLICE = "slice"
    SUM = collectives.SUM


def _without_suffix(tensor: Sharded, dim: str, axes: str) -> str:
    held = tensor.of(dim)
    if not axes or not held.endswith(axes):
        raise ConfigError(f"{tensor} does not end its {dim} with {axes!r}; only the finest axes can be moved.")
    return held[: len(held) - len(axes)]


def all_gather(tensor: Sharded, dim: str, axes: str) -> Sharded:
    """`E_zy` gathered over y is `E_z`."""
    return tensor.with_axes(dim, _without_suffix(tensor, dim, axes))


def reduce_scatter(tensor: Sharded, dim: str, axes: str) -> Sharded:
    """`F_zy +x` scattered over x into F is `F_zyx`."""
    if not axes or not set(axes) <= set(tensor.partial):
        raise ConfigError(f"{tensor} is not a partial sum over {axes!r}.")
    left = "".join(a for a in tensor.partial if a not in axes)
    return replace(tensor.with_axes(dim, tensor.of(dim) + axes), partial=left)


def all_reduce(tensor: Sharded, axes: str) -> Sharded:
    """`BL +x` summed over x is `BL` on every chip."""
    if not axes or not set(axes) <= set(tensor.partial):
        raise ConfigError(f"{tensor} is not a partial sum over {axes!r}.")
    return replace(tensor, partial="".join(a for a in tensor.partial if a not in axes))


def all_to_all(tensor: Sharded, source: str, target: str, axes: str) -> Sharded:
    """`BLH_zy` turned from H to B over y is `B_yLH_z`."""
    left = _without_suffix(tensor, source, axes)
    return tensor.with_axes(source, left).with_axes(target, tensor.of(target) + axes)


def cut(tensor: Sharded, dim: str, axes: str) -> Sharded:
    """A chip keeps its part of a dimension that was whole over `axes`."""
    if set(axes) & set("".join(tensor.axes) + tensor.partial):
        raise ConfigError(f"{tensor} is already cut over {axes!r}.")
    return tensor.with_axes(dim, tensor.of(dim) + axes)


def contract(a: Sharded, b: Sharded, out: str) -> Sharded:
    """The product of two tensors summed over the dimensions that `out` lacks; those cut over axes leave partial sums.

    Raises ConfigError if a shared dimension is cut differently, or an axis would be used twice.
    """
    cuts: dict[str, str] = {}
    for tensor in (a, b):
        for dim, axes in zip(tensor.dims, tensor.axes, strict=True):
            if cuts.setdefault(dim, axes) != axes:
                raise ConfigError(f"{a} and {b} cut {dim} differently; gather one of them first.")
    if b.partial:
        raise ConfigError(f"{b} is a partial sum and cannot be multiplied by.")
    summed = "".join(axes for dim, axes in cuts.items() if dim not in out)
    found = Sharded(out, tuple(cuts[dim] for dim in out), a.partial + summed)
    used = "".join(found.axes) + found.partial
    if len(set(used)) != len(used):
        raise ConfigError(f"{a} times {b} would use an axis twice in {found}.")
    return found


def volume(kind: Kind, before: Sharded, after: Sharded, axes: str, sizes: Mapping[str, float], mesh: Mesh) -> float:
    """Elements that each chip sends."""
    k = mesh.count(axes)
    held, holds = before.local(sizes, mesh), after.local(sizes, mesh)
    match kind:
        case Kind.ALL_GATHER:
            return holds * (k - 1) / k
        case Kind.REDUCE_SCATTER:
            return held * (k - 1) / k
        case Kind.ALL_REDUCE | Kind.SUM:
            return 2 * held * (k - 1) / k
        case Kind.ALL_TO_ALL:
            return held * (k - 1) / k
        case Kind.SLICE:
            return 0.0
