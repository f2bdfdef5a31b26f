"""Which kernel multiplies by a quantized matrix at how many tokens: a lookup, as for plain ones.

The table is measured by `runtime/probes/quantized.py`; its key has the format and the group. A matrix that no profile
knows gets what was fastest for about its shape on an H200.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TypeAlias

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.core.hardware import Table
from cellar.ops.linear.choice import KEY, Shape
from cellar.ops.linear.mixed import Mixed, mixed_takes
from cellar.ops.linear.nibbles import Nibbles
from cellar.ops.room import Room
from cellar.quant.packed import parts_of, span_of

LEAST_ROWS = 32
"""The fewest rows of a tile."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of tiles: rows, tokens (of fewer tokens the next power of two), stages in flight, splits along K, warps."""

    rows: int
    tokens: int
    stages: int
    splits: int
    warps: int = 4

    def __post_init__(self) -> None:
        _check(self, {"rows": LEAST_ROWS, "tokens": 8, "warps": 1})
        if self.stages < 1 or self.splits < 1:
            raise ConfigError(f"tiles cannot have {self.stages} stages and {self.splits} splits; give 1 or more.")

    def shared(self, format: Format, tokens: int, room: Room) -> int:
        """Bytes of shared memory for so many tokens of 16-bit floats: words and tokens of the turns in flight.

        Words go on to registers, so the turn at hand needs no place; tokens where tensor cores do not read them there.
        """
        span, parts = span_of(format), parts_of(format)
        wide = min(self.tokens, max(8, _power_of_2(tokens)))
        kept = self.stages if room.keeps_all_stages and wide > 8 else max(1, self.stages - 1)
        return max(1, self.stages - 1) * self.rows * span * 2 + kept * parts * wide * span * 2

    def fitting(self, format: Format, tokens: int, room: Room) -> Tiles:
        """The same, with fewer stages, tokens and rows until the device has room for them."""
        tried: Tiles | None = self
        while tried is not None:
            if tried.shared(format, tokens, room) <= room.shared and tried.warps <= room.warps:
                return tried
            tried = tried.smaller()
        return Tiles(LEAST_ROWS, 8, 1, self.splits)

    def smaller(self) -> Tiles | None:
        """The next sizes to try where a device refuses these; None: no smaller ones."""
        if self.stages > 2:
            return replace(self, stages=self.stages - 1)
        if self.tokens > 32:
            return replace(self, tokens=self.tokens // 2)
        if self.rows > LEAST_ROWS:
            return replace(self, rows=self.rows // 2, warps=max(4, self.warps // 2))
        return None


# None is the library's product of the expanded matrix. A matrix has the form of tiles, or of nibbles (int4 on Hopper);
# mixed is for both.
Sizes: TypeAlias = Tiles | Nibbles | Mixed
Kernel: TypeAlias = Sizes | None


@dataclass(frozen=True, slots=True)
class QuantizedChoice:
    """Of one matrix: `kernels[i]` up to `tokens[i]` tokens (ascending), the library's product beyond the last."""

    tokens: tuple[int, ...]
    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) != len(self.kernels) or not ascending:
            raise ConfigError("a choice of kernels needs one kernel for each of ascending numbers of tokens.")

    def at(self, m: int) -> Kernel:
        """The kernel for `m` tokens."""
        i = bisect_left(self.tokens, m)
        return self.kernels[i] if i < len(self.kernels) else None

    def fitting(self, format: Format, room: Room) -> QuantizedChoice:
        """The same with tiles that a device has room for."""
        pairs = zip(self.tokens, self.kernels, strict=True)
        kernels = tuple(k.fitting(format, m, room) if isinstance(k, Tiles) else k for m, k in pairs)
        return QuantizedChoice(self.tokens, kernels)

    def all_are(self, *kinds: type[Sizes]) -> bool:
        """True if all kernels, but for the library, are of these kinds: others want another form, or another shape."""
        return all(kernel is None or isinstance(kernel, kinds) for kernel in self.kernels)


def default_choice(format: Format, n: int, k: int) -> QuantizedChoice:
    """What was fastest on an H200 for matrices of about this shape (docs/log/quantized-gpu.md)."""
    narrow = n <= 12_000
    if parts_of(format) == 4:
        few, many, most = Tiles(64, 32, 4, 8 if narrow else 1), Tiles(128, 128, 3, 4 if narrow else 1, 8), 192
    else:
        splits = 1 if not narrow else 4 if k > 8192 else 2
        few, many, most = Tiles(64, 32, 4, 4 if narrow else 1), Tiles(64, 128, 3, splits), 512
    return QuantizedChoice((32, 64, most), (few, Tiles(64, 64, 4, 4 if narrow else 1), many))


def default_spans(n: int, k: int) -> QuantizedChoice:
    """The same for int8 with a scale for each row on Hopper."""
    tiles = default_choice(Format("int8"), n, k)
    if not _is_large(n, k):
        return tiles
    few, some, many = tiles.kernels
    found: tuple[Kernel, ...]
    if n >= 16_384:
        found = Mixed(64, 4, 1, 4), Mixed(128, 4, 1, 3), Mixed(256, 2, 1, 2)
    elif n > 4096:
        found = Mixed(64, 2, 2, 6), Mixed(128, 2, 2, 4), Mixed(256, 1, 1, 3)
    elif k > 8192:
        found = some, many, Mixed(128, 2, 2, 4)
    else:
        found = Mixed(64, 1, 4, 2, 3), Mixed(128, 1, 2, 2, 2), Mixed(128, 2, 2, 4)
    # Alone the kernel for many tokens is faster from 17 on, in a model from 33 on (docs/log/quantized-gpu.md).
    return QuantizedChoice((32, 64, 128, 256, 512), (few, *found, many))


def default_nibbles(n: int, k: int) -> QuantizedChoice:
    """The same for int4 on Hopper."""
    few = _few_nibbles(n, k)
    if not _is_large(n, k):
        return few
    found: tuple[Kernel, ...]
    if n >= 16_384:
        found = Mixed(32, 4, 1, 6), Mixed(64, 2, 1, 4, 2), Mixed(128, 4, 1, 4), Mixed(256, 2, 1, 3)
    elif n > 4096:
        found = Mixed(32, 2, 2, 5, 2), Mixed(64, 2, 2, 3, 2), Mixed(128, 2, 2, 4), Mixed(256, 1, 1, 3)
    else:
        found = few.at(32), Mixed(64, 1, 2, 3, 3), Mixed(64, 2, 2, 3, 2), Mixed(128, 2, 2, 4)
    return QuantizedChoice((1, 8, 16, 32, 64, 128, 256), (few.at(1), few.at(8), few.at(16), *found))


def _is_large(n: int, k: int) -> bool:
    """True where the kernel for many tokens was measured, or about: for small matrices it was not."""
    return n >= 1024 and k >= 2048 and mixed_takes(n, k)


def _few_nibbles(n: int, k: int) -> QuantizedChoice:
    """Without the kernel for many tokens."""
    if n >= 16_384:
        found = Nibbles(2, 8, 1, 2, 2, 2), Nibbles(2, 8, 1, 1, 4, 2), Nibbles(4, 8, 1, 1, 2, 1)
    elif n > 4096 and k <= 2 * n:
        found = Nibbles(1, 8, 1, 2, 2, 3), Nibbles(2, 8, 1, 1, 4, 2), Nibbles(4, 8, 1, 1, 2, 1)
    else:
        found = Nibbles(2, 8, 2, 2, 2, 2), Nibbles(2, 8, 2, 1, 2, 2), Nibbles(2, 8, 2, 1, 2, 2)
    # One token goes into float16 first, in each block of a cluster: short rows share no columns then.
    alone = Nibbles(1, 8, 1, 2, 2, 3) if n <= 4096 and k <= 8192 else found[0]
    return QuantizedChoice((1, 8, 16, 32, 128 if k > 8192 else 64), (alone, *found, Nibbles(2, 4, 2, 1, 2, 2)))


# -- the table in the profile ------------------------------------------------------------------------

# A row has the fastest kernel of one shape at m tokens with its sizes (as `64/32/4/1/4`, empty where it has none), its
# seconds and those of the expanded matrix with the library.
TABLE = "linear.quantized"
COLUMNS = (*KEY, "m", "kernel", "sizes", "seconds", "library_seconds")
_LIBRARY = "library"
_KINDS: Mapping[str, type[Sizes]] = {"tiles": Tiles, "nibbles": Nibbles, "mixed": Mixed}


@dataclass(frozen=True, slots=True)
class QuantizedTiming:
    """The fastest kernel of one shape at `m` tokens."""

    m: int
    kernel: Kernel
    seconds: float
    library: float

    def row(self, shape: Shape) -> tuple[float | int | str, ...]:
        """As the table has it."""
        name, sizes = _LIBRARY, ""
        if self.kernel is not None:
            name = next(name for name, kind in _KINDS.items() if isinstance(self.kernel, kind))
            sizes = "/".join(map(str, astuple(self.kernel)))
        return (*shape, self.m, name, sizes, self.seconds, self.library)


def quantized_choices(tables: Mapping[str, Table]) -> dict[Shape, QuantizedChoice]:
    """From a profile's tables: shape -> what was fastest. Raises ConfigError for rows that make no sense."""
    return {
        shape: QuantizedChoice(tuple(t.m for t in timings), tuple(t.kernel for t in timings))
        for shape, timings in quantized_timings(tables).items()
    }


def quantized_timings(tables: Mapping[str, Table]) -> dict[Shape, list[QuantizedTiming]]:
    """Shape -> its rows by ascending m."""
    table = tables.get(TABLE)
    if table is None:
        return {}
    if table.columns != COLUMNS:
        raise ConfigError(
            f"the profile's table {TABLE!r} has other columns than {', '.join(COLUMNS)}; measure it again."
        )
    found: dict[Shape, list[QuantizedTiming]] = {}
    for n, k, format, group, m, name, sizes, seconds, library in table.rows:
        kernel = _kernel(str(name), str(sizes))
        shape = Shape(int(n), int(k), str(format), int(group))
        found.setdefault(shape, []).append(QuantizedTiming(int(m), kernel, float(seconds), float(library)))
    return {shape: sorted(timings, key=lambda t: t.m) for shape, timings in found.items()}


def _kernel(name: str, sizes: str) -> Kernel:
    if name == _LIBRARY:
        return None
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"the profile names a kernel {name!r}, but only {', '.join(_KINDS)} and library are known.")
    given = sizes.split("/")
    if len(given) != len(fields(kind)) or not all(size.isdecimal() for size in given):
        raise ConfigError(f"the profile gives {name} the sizes {sizes!r}, but {len(fields(kind))} numbers are wanted.")
    return kind(*map(int, given))


def tables_with(tables: Mapping[str, Table], measured: Mapping[Shape, Sequence[QuantizedTiming]]) -> dict[str, Table]:
    """A profile's table of quantized matrices with shapes added; those measured before are replaced."""
    every = {**quantized_timings(tables), **measured}
    return {TABLE: Table(COLUMNS, tuple(t.row(shape) for shape in sorted(every) for t in every[shape]))}


def _check(sizes: object, least: Mapping[str, int]) -> None:
    for name, smallest in least.items():
        value = getattr(sizes, name)
        if value < smallest or value != _power_of_2(value):
            kind = type(sizes).__name__
            raise ConfigError(f"{name} of {kind} is {value}; it must be a power of two of at least {smallest}.")


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
