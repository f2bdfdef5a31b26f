"""Boxes of chips, and how a transformer block lies over one: data that the planner prices and ranks execute.

The letters stand in `planner/layouts.py`. `STORED` is the stored form of weights, the same for every layout: axes of a
`TensorSpec` and the axes of the mesh that cut them. What bears one name is cut alike, so that products need no move.
Vectors are repeated on every chip, and so is what projects words to another width.
"""

from __future__ import annotations

from dataclasses import dataclass

from cellar.core.errors import ConfigError
from cellar.core.messages import Partition


@dataclass(frozen=True, slots=True)
class Mesh:
    """Chips as a box of x times y times z."""

    x: int = 1
    y: int = 1
    z: int = 1

    @property
    def size(self) -> int:
        """Number of chips."""
        return self.x * self.y * self.z

    def count(self, axes: str) -> int:
        """Chips along some axes."""
        product = 1
        for axis in axes:
            product *= getattr(self, axis)
        return product

    def hops(self, axes: str) -> int:
        """Steps of a ring collective along each axis in turn."""
        return sum(getattr(self, axis) - 1 for axis in axes)

    def index(self, rank: int, axes: str) -> int:
        """Where a rank stands along some axes, the first of them the coarsest. Ranks count along z first, then y, x."""
        at = {"x": rank // (self.y * self.z), "y": rank // self.z % self.y, "z": rank % self.z}
        found = 0
        for axis in axes:
            found = found * getattr(self, axis) + at[axis]
        return found

    def group(self, rank: int, axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one along `axes` alone, in the order of their index there."""
        others = "".join(axis for axis in "xyz" if axis not in axes)
        alike = (other for other in range(self.size) if self.index(other, others) == self.index(rank, others))
        return tuple(sorted(alike, key=lambda other: self.index(other, axes)))


STORED = {
    "embed": "x",
    "qkv": "zy",
    "heads": "zy",
    "gate_up": "zy",
    "mlp": "zy",
    "vocab": "zyx",
    "head_dim": "",
    "position": "",
    "words": "",
}


def stored_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of the mesh that cut each axis of a tensor, as it is stored.

    A table of words is cut along the vocabulary alone, as the head is: an axis of the mesh cuts once.
    """
    if len(axes) == 1 or "words" in axes or "position" in axes:
        return ("",) * len(axes)
    if "vocab" in axes:
        return tuple(STORED[axis] if axis == "vocab" else "" for axis in axes)
    return tuple(STORED[axis] for axis in axes)


GATHERS = ("", "x", "xy", "xyz")


@dataclass(frozen=True, slots=True)
class Layout:
    """`gather`: axes over which weights are gathered. `head_axes`: axes that cut the heads in attention."""

    mesh: Mesh
    gather: str = ""
    head_axes: str = ""

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise ConfigError(f"weights are gathered over one of {GATHERS}, not {self.gather!r}.")
        if not self.spread.startswith(self.head_axes):
            raise ConfigError(f"head_axes {self.head_axes!r} must begin {self.spread!r}, the axes left for attention.")

    @property
    def name(self) -> str:
        """`1D`, `2D`, `X`, `XY` or `XYZ`."""
        if self.gather:
            return self.gather.upper()
        return "1D" if self.mesh.x == 1 else "2D"

    @property
    def attention(self) -> str:
        """`heads`, `batch` or `mixed`."""
        if self.mesh.count(self.spread) == self.mesh.count(self.head_axes):
            return "heads" if self.mesh.count(self.spread) > 1 else "batch"
        return "batch" if self.mesh.count(self.head_axes) == 1 else "mixed"

    @property
    def spread(self) -> str:
        """Axes that attention spreads over heads and batch, in that order."""
        return "zyx" if not self.gather else "".join(a for a in "zy" if a not in self.gather)

    @property
    def rest(self) -> str:
        """Axes that cut F and H in the products."""
        return "".join(a for a in "zy" if a not in self.gather)

    @property
    def stream(self) -> str:
        """Axes that cut E between blocks, x the coarsest."""
        return ("" if self.gather else "x") + self.rest

    @property
    def to_batch(self) -> str:
        """Axes over which attention turns heads into rows."""
        return self.spread[len(self.head_axes) :]

    @property
    def batch_axes(self) -> str:
        """Axes that cut the batch in attention, and so the KV cache."""
        return self.gather + self.to_batch

    def is_tensor_parallel(self, kv_heads: int) -> bool:
        """Whether it is tensor parallelism by heads as well (`models/sharding.py`): weights stay, E is whole on every
        chip, and the heads of queries, K and V are cut over all.
        """
        return (
            self.mesh.size > 1
            and self.mesh.x == 1
            and self.mesh.count(self.gather) == 1
            and self.mesh.count(self.head_axes) == self.mesh.count(self.kv_axes(kv_heads)) == self.mesh.size
        )

    def kv_axes(self, kv_heads: int) -> str:
        """The part of `head_axes` that cuts the heads of K and V; over the others the cache is repeated."""
        return _dividing(self.mesh, self.head_axes, kv_heads)

    def stored_kv_axes(self, kv_heads: int) -> str:
        """Axes that cut the heads of the stored w_k and w_v."""
        return _dividing(self.mesh, "zy", kv_heads)

    def kv_copies(self, kv_heads: int) -> int:
        """Chips that hold the same K and V."""
        return self.mesh.count(self.head_axes) // self.mesh.count(self.kv_axes(kv_heads))


@dataclass(frozen=True, slots=True)
class Relay:
    """One move of a cache of K and V: what an axis of the mesh cut of it, and cuts then (`B`, `K`, "" for neither)."""

    axis: str
    before: str
    after: str


def relay(source: Layout, target: Layout, kv_heads: int) -> tuple[Relay, ...]:
    """From the cache of one layout to another's, of one mesh: what is free first, then K's axes from the finest on.

    A row's home is a chip: it lies where chips agree with its home along the axes that cut the batch.
    """
    was, now = source.kv_axes(kv_heads), target.kv_axes(kv_heads)
    same = 0
    while same < min(len(was), len(now)) and was[same] == now[same]:
        same += 1
    lost, gained = was[same:], now[same:]
    kept, wanted = source.batch_axes, target.batch_axes
    found = [Relay(a, "", "B") for a in wanted if a not in kept and a not in lost]
    found += [Relay(a, "K", "B" if a in wanted else "") for a in reversed(lost)]
    found += [Relay(a, "B", "") for a in kept if a not in wanted and a not in gained]
    found += [Relay(a, "B" if a in kept else "", "K") for a in gained]
    return tuple(step for step in found if source.mesh.count(step.axis) > 1)


def _dividing(mesh: Mesh, axes: str, heads: int) -> str:
    """The longest beginning of `axes` whose chips divide `heads`."""
    for stop in range(len(axes), 0, -1):
        if heads % mesh.count(axes[:stop]) == 0:
            return axes[:stop]
    return ""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How an engine lays out steps with prompts, and steps of decodes alone, over one mesh.

    Rows have homes, numbered along `decode.batch_axes`. `looped`: long steps with prompts are cut into chunks, one of
    which is sent while the next is multiplied (`core/loops.py`). Raises ConfigError for two meshes.
    """

    prefill: Layout
    decode: Layout
    looped: bool = False

    def __post_init__(self) -> None:
        if self.prefill.mesh != self.decode.mesh:
            raise ConfigError("prompts and decodes have meshes of their own; both run on one. Plan again.")

    @property
    def mesh(self) -> Mesh:
        """All chips."""
        return self.decode.mesh

    @property
    def homes(self) -> int:
        """Places that a row's K and V may have."""
        return self.mesh.count(self.decode.batch_axes)

    @property
    def gathers(self) -> bool:
        """Whether any step gathers weights."""
        return bool(self.prefill.gather or self.decode.gather)

    def moves(self, kv_heads: int) -> bool:
        """Whether K and V of prompts lie elsewhere than decodes want them."""
        return bool(relay(self.prefill, self.decode, kv_heads))

    @classmethod
    def of(cls, split: Partition) -> Layouts:
        """Those of a plan, of one of its stages."""
        mesh = Mesh(*split.mesh)
        return cls(
            Layout(mesh, split.prefill_gather, split.prefill_heads),
            Layout(mesh, split.decode_gather, split.decode_heads),
            split.looped,
        )

    def places(self, layout: Layout) -> tuple[int, ...]:
        """Where each home lies along one layout's axes of the batch."""
        found = {self.mesh.index(r, self.decode.batch_axes): r for r in range(self.mesh.size)}
        return tuple(self.mesh.index(found[home], layout.batch_axes) for home in range(self.homes))
