"""Collectives along named axes of a mesh: what a layout needs of whatever joins the chips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cellar.core.layouts import Mesh


class Collectives(Protocol):
    """Every rank of a group calls the same, in the same order. Sums are in the order of the group: the same bits.

    `axes` are axes of the mesh, the coarsest first: the group are the ranks that differ along them alone. `name` is
    what is sent, for the account. `sizes` are the shares of a dimension that is cut unequally, one for each of the
    group; None: equal shares.
    """

    @property
    def mesh(self) -> Mesh:
        """All chips."""

    @property
    def rank(self) -> int:
        """This one."""

    def all_reduce(self, x: Tensor, axes: str, name: str) -> Tensor:
        """The sum of all parts."""

    def reduce_scatter(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's share along `dim` of the sum of all parts."""

    def all_gather(self, x: Tensor, dim: int, axes: str, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """All parts behind one another along `dim`."""

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
        """This rank's share along `split` of every part, behind one another along `join`."""
