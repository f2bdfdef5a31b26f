"""AxisCollectives: collectives along the axes of a mesh, over process groups of gloo or NCCL, summed in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor

from cellar.core.layouts import Mesh
from cellar.core.sums import at_once, moved_by_all_reduce, sent_by_all_reduce
from cellar.ops.added import added
from cellar.ops.collectives import shares
from cellar.runtime.mesh.account import Account, Entry
from cellar.runtime.ranks.comm import as_bytes, gone

Members = tuple[int, ...]
"""Ranks of a group, ascending."""


def groups_of(mesh: Mesh, rank: int) -> list[tuple[str, Members]]:
    """The groups of several ranks that a rank is in, each with axes that name it, in the same order on every rank."""
    found: dict[Members, str] = {}
    live = "".join(axis for axis in "xyz" if mesh.count(axis) > 1)
    for count in range(1, len(live) + 1):
        for axes in combinations(live, count):
            name = "".join(axes)
            found.setdefault(tuple(sorted(mesh.group(rank, name))), name)
    return [(name, members) for members, name in found.items()]


class AxisCollectives:
    """Implements `Collectives` and `RankLink`. `groups` are the process groups of `groups_of`, `everyone` that of all.

    Libraries move bytes and add nothing: sums are in the order of the group, in float32 for narrower types, so that a
    request's tokens do not depend on its company. `account` keeps what was sent, `waited` the seconds of this
    rank's host in collectives. Raises DeviceError if a rank has gone.
    """

    def __init__(self, mesh: Mesh, rank: int, groups: Mapping[Members, Any]) -> None:
        self.mesh = mesh
        self.rank = rank
        self.size = mesh.size
        self.count = 0
        self.waited = 0.0
        self.account = Account()
        self._groups = groups

    # -- RankLink ------------------------------------------------------------------------------------

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, contiguous, in the place of everyone's."""
        self._exchange(lambda: self._groups[tuple(range(self.size))].broadcast([x]))
        return x

    # -- Collectives ---------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, axes: str, name: str) -> Tensor:
        """As `Collectives` says; `x` itself for a group of one."""
        group = self.mesh.group(self.rank, axes)
        size = len(group)
        if size == 1:
            return x
        if at_once(x.nbytes, size):
            total = added(stacked(self._gathered(x, group, [x.shape] * size)))
        else:
            each = -(-x.numel() // size)
            flat = x.new_zeros(each * size)
            flat[: x.numel()] = x.reshape(-1)
            mine = self._summed(flat.view(size, each).unbind(), group)
            total = torch.cat(self._gathered(mine, group, [mine.shape] * size))[: x.numel()].view(x.shape)
        moved = moved_by_all_reduce(x.nbytes, x.element_size(), size)
        self.account.add(Entry("all-reduce", axes, name), sent_by_all_reduce(x.nbytes, size), moved)
        return total

    def reduce_scatter(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """As `Collectives` says."""
        group = self.mesh.group(self.rank, axes)
        if len(group) == 1:
            return x
        found = self._summed(list(x.split_with_sizes(shares(x.shape[dim], len(group), sizes), dim)), group)
        others = (len(group) - 1) * found.nbytes
        self.account.add(Entry("reduce-scatter", axes, name), x.nbytes - found.nbytes, others)
        return found

    def all_gather(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """As `Collectives` says."""
        group = self.mesh.group(self.rank, axes)
        if len(group) == 1:
            return x
        each = [x.shape[dim]] * len(group) if sizes is None else sizes
        found = torch.cat(self._gathered(x, group, [_resized(x, {dim: n}) for n in each]), dim)
        others = found.nbytes - x.nbytes
        self.account.add(Entry("all-gather", axes, name), others, others)
        return found

    def all_to_all(
        self,
        x: Tensor,
        split: int,
        join: int,
        axes: str,
        name: str,
        *,
        split_sizes: Sequence[int] | None = None,
        join_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """As `Collectives` says."""
        group = self.mesh.group(self.rank, axes)
        if len(group) == 1:
            return x
        each = shares(x.shape[split], len(group), split_sizes)
        mine = each[group.index(self.rank)]
        theirs = [x.shape[join]] * len(group) if join_sizes is None else join_sizes
        shapes = [_resized(x, {split: mine, join: n}) for n in theirs]
        found = torch.cat(self._exchanged(list(x.split_with_sizes(each, split)), group, shapes), join)
        own = x.nbytes // max(1, x.shape[split]) * mine
        self.account.add(Entry("all-to-all", axes, name), x.nbytes - own, found.nbytes - own)
        return found

    # -- how -----------------------------------------------------------------------------------------

    def _summed(self, pieces: Sequence[Tensor], group: Members) -> Tensor:
        """A piece for each of the group -> the sum of what all have for this rank."""
        mine = pieces[group.index(self.rank)]
        return added(stacked(self._exchanged(pieces, group, [mine.shape] * len(group))))

    def _exchanged(self, pieces: Sequence[Tensor], group: Members, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """A piece for each of the group -> what each has for this rank, of these shapes; all in the group's order."""
        members, like = tuple(sorted(group)), pieces[0]
        places = [group.index(member) for member in members]
        sent = [pieces[k].numel() * like.element_size() for k in places]
        received = [prod(shapes[k]) * like.element_size() for k in places]
        there = torch.empty(sum(received), dtype=torch.uint8, device=like.device)
        if sum(sent) or sum(received):
            here = torch.cat([as_bytes(pieces[k].contiguous()) for k in places])
            run = self._groups[members].alltoall_base
            self._exchange(lambda: run(there, here, received, sent))
        found = dict(zip(places, there.split_with_sizes(received), strict=True))
        return [_as(found[k], like, shapes[k]) for k in range(len(group))]

    def _gathered(self, x: Tensor, group: Members, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """What each of the group has, of these shapes, in the group's order."""
        members = tuple(sorted(group))
        places = [group.index(member) for member in members]
        widest = max(prod(shape) for shape in shapes) * x.element_size()
        there = torch.empty((len(group), widest), dtype=torch.uint8, device=x.device)
        if widest:
            here = as_bytes(x.contiguous())
            if len(here) < widest:
                here = torch.nn.functional.pad(here, (0, widest - len(here)))
            run = self._groups[members]._allgather_base
            self._exchange(lambda: run(there.view(-1), here))
        found = dict(zip(places, there, strict=True))
        return [_as(found[k][: prod(shapes[k]) * x.element_size()], x, shapes[k]) for k in range(len(group))]

    def _exchange(self, begin: Callable[[], Any]) -> None:
        self.count += 1
        begun = time.monotonic()
        with gone():
            begin().wait()
        self.waited += time.monotonic() - begun


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Parts of one shape as [parts, ...]: a view where they lie behind one another, as a network has left them."""
    first = parts[0]
    apart = all(part.is_contiguous() for part in parts) and first.numel() > 0
    if apart and all(part.data_ptr() == first.data_ptr() + k * first.nbytes for k, part in enumerate(parts)):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(parts))


def _resized(x: Tensor, sizes: Mapping[int, int]) -> list[int]:
    return [sizes.get(dim, length) for dim, length in enumerate(x.shape)]


def _as(nbytes: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Bytes as what they are."""
    if nbytes.storage_offset() % like.element_size():
        nbytes = nbytes.clone()
    return nbytes.view(like.dtype).view(list(shape))
