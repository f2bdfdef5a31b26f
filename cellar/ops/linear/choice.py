"""Which kernel multiplies by a matrix at how many tokens (FlashDecoding++ §5): a lookup, made once per matrix.

The paper's rule is two numbers for each [N, K]: the GEMV below M1 tokens, the flat product below M2, the library's
GEMM from there on. On today's GPUs the order is not monotone, so a table over M decides, and M1 and M2 are how it is
reported (`inflections`). The table is measured by `runtime/probes/linear.py` and comes with the machine's profile; a
matrix that no profile knows gets what was fastest for about its shape on an H200.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, TypeAlias

from cellar.core.errors import ConfigError
from cellar.core.hardware import Table
from cellar.ops.room import Room

MAX_FLAT_TOKENS = 64

# Fewer tokens than these are not for the wide product: alone it is as fast as others, but in a model what comes behind
# it is slower, for its blocks gather on the multiprocessors where wide ones end first (docs/log/linear-kernels.md).
WIDE_FROM = 33

# Seconds over another kernel's up to which the wide product is chosen: it begins before the kernel in front has ended,
# which gains more behind long kernels than behind the short one with which it is measured.
DRAW = 1.025

# Of the wide product: the most rows of a tile by its tokens, whose sums fill a thread's registers; blocks of a cluster,
# bytes of a block's shared memory.
MOST_ROWS = {64: 256, 128: 256, 192: 192}
MAX_CLUSTER = 8
MAX_SHARED = 231_424

# The widest row that the GEMV with a norm inside holds in registers at once.
MAX_FUSED_COLUMNS = 8192

# The fewest rows of a block of the flat product: there is a counter for each of so many rows.
LEAST_FLAT_ROWS = 32


@dataclass(frozen=True, slots=True)
class Gemv:
    """Sizes of the GEMV: rows per program, columns per turn, turns requested before the wait, warps."""

    rows: int
    block: int
    ahead: int
    warps: int

    def __post_init__(self) -> None:
        _check(self, ("rows", "block", "warps"), least=1)
        if self.ahead < 0:
            raise ConfigError(f"a GEMV cannot request {self.ahead} turns ahead; give 0 or more.")


@dataclass(frozen=True, slots=True)
class Flat:
    """Sizes of the flat product: rows and columns per turn, stages in flight, programs that share rows, warps."""

    rows: int
    depth: int
    stages: int
    splits: int
    warps: int = 4

    def __post_init__(self) -> None:
        _check(self, ("rows",), least=LEAST_FLAT_ROWS)
        _check(self, ("depth",), least=16)
        _check(self, ("warps",), least=1)
        if self.stages < 1 or self.splits < 1:
            raise ConfigError(
                f"a flat product cannot have {self.stages} stages and {self.splits} splits; give 1 or more."
            )

    def shared(self, tokens: int, room: Room) -> int:
        """Bytes of shared memory for so many tokens of 16-bit floats: rows and tokens of the turns in flight."""
        padded = max(8, _power_of_2(tokens))
        kept = self.stages if room.keeps_all_stages else max(1, self.stages - 1)
        return kept * (self.rows + padded) * self.depth * 2

    def fitting(self, tokens: int, room: Room) -> Flat | None:
        """The same with as many stages, then as many columns a turn, as the device has room for; None: it has none."""
        for depth in (d for d in (self.depth, self.depth // 2, self.depth // 4) if d >= 16):
            for stages in range(self.stages, min(2, self.stages) - 1, -1):
                sizes = Flat(self.rows, depth, stages, self.splits, self.warps)
                if sizes.shared(tokens, room) <= room.shared:
                    return sizes
        return None

    def smaller(self) -> Flat | None:
        """The next sizes to try where a device refuses these; None: no smaller ones."""
        if self.stages > 2:
            return Flat(self.rows, self.depth, self.stages - 1, self.splits, self.warps)
        if self.depth > 32:
            return Flat(self.rows, self.depth // 2, self.stages, self.splits, self.warps)
        return None


@dataclass(frozen=True, slots=True)
class Fused:
    """Sizes of the GEMV with add, norm (and gate) inside: rows per program, warps."""

    rows: int
    warps: int

    def __post_init__(self) -> None:
        _check(self, ("rows", "warps"), least=1)


@dataclass(frozen=True, slots=True)
class Wide:
    """Sizes of the wide product: tokens and rows of a tile, stages in flight, and what a cluster of blocks shares.

    So many blocks share rows of the matrix, so many share tokens, so many are parts of one sum. Persistent: a block
    goes on with the next tile while the last one is written.
    """

    tokens: int
    rows: int
    stages: int
    sharing_rows: int = 1
    sharing_tokens: int = 1
    parts: int = 1
    persistent: bool = False

    def __post_init__(self) -> None:
        _check(self, ("sharing_rows", "sharing_tokens", "parts"), least=1)
        most = MOST_ROWS.get(self.tokens, 0)
        if not 16 <= self.rows <= most or self.rows % (16 * self.sharing_rows):
            raise ConfigError(
                f"a wide product cannot have tiles of {self.tokens} tokens x {self.rows} rows; give 64, 128 or 192 "
                f"tokens, and up to 256 rows (192 with 192 tokens) in multiples of {16 * self.sharing_rows}."
            )
        if self.cluster > MAX_CLUSTER:
            raise ConfigError(f"a wide product cannot have clusters of {self.cluster}; {MAX_CLUSTER} is the most.")
        if self.parts > 1 and (self.persistent or self.tokens // 16 % self.parts):
            raise ConfigError(
                f"a wide product of {self.tokens} tokens cannot have {self.parts} parts; give one part, or without "
                f"persisting a divisor of {self.tokens // 16}."
            )
        if self.stages < 1 or self.shared(gate=False) > MAX_SHARED:
            raise ConfigError(
                f"a wide product of {self.tokens} x {self.rows} cannot have {self.stages} stages; give 1 or more that "
                f"fit {MAX_SHARED} bytes of shared memory."
            )

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.sharing_rows * self.sharing_tokens * self.parts

    @property
    def threads(self) -> int:
        """Threads of a block: four warps for 64 tokens, and one that loads."""
        return 2 * self.tokens + 32

    def columns(self, gate: bool) -> int:
        """Columns of the result in a tile."""
        return self.rows // 2 if gate else self.rows

    def shared(self, gate: bool) -> int:
        """Bytes of dynamic shared memory: the stages; instead or beside them the result on its way out, other parts."""
        stages = self.stages * ((self.tokens + self.rows) * 128 + 16)
        if self.parts > 1:
            return 1024 + stages + self.tokens * self.rows * 4 * (self.parts - 1) // self.parts
        if self.persistent:
            return 1024 + stages + self.tokens * (min(self.columns(gate), 64) + 8) * 2
        return 1024 + max(stages, self.tokens * (self.columns(gate) + 8) * 2)


# None is the library's product.
Kernel: TypeAlias = Gemv | Flat | Wide | None


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Of one matrix: `kernels[i]` up to `tokens[i]` tokens (ascending), the library beyond the last.

    `fused` serves one token that needs a norm before; None: the norm is a launch of its own. `wide`: (tokens, sizes),
    ascending: from WIDE_FROM up to so many tokens the wide product goes before all others where the device has it, but
    not if it has None.
    """

    tokens: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    fused: Fused | None = None
    wide: tuple[tuple[int, Wide | None], ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.kernels) or any(
            a >= b for a, b in zip(self.tokens, self.tokens[1:], strict=False)
        ):
            raise ConfigError("a choice of linear kernels needs one kernel for each of ascending numbers of tokens.")
        for m, kernel in zip(self.tokens, self.kernels, strict=True):
            if isinstance(kernel, Gemv) and m != 1:
                raise ConfigError(f"a GEMV multiplies one token, not {m}; take a flat product or the library.")
            if isinstance(kernel, Flat) and m > MAX_FLAT_TOKENS:
                raise ConfigError(f"a flat product multiplies at most {MAX_FLAT_TOKENS} tokens, not {m}.")

    def at(self, m: int, wide: bool = False) -> Kernel:
        """The kernel for `m` tokens, on a device that has the wide product or not."""
        if wide and (sizes := self.wide_at(m)) is not None:
            return sizes
        i = bisect_left(self.tokens, m)
        return self.kernels[i] if i < len(self.kernels) else None

    def fitting(self, room: Room) -> LinearChoice:
        """The same with flat products that such a device has room for, the library's where none fits."""
        kernels = tuple(
            kernel.fitting(m, room) if isinstance(kernel, Flat) else kernel
            for m, kernel in zip(self.tokens, self.kernels, strict=True)
        )
        return self if kernels == self.kernels else LinearChoice(self.tokens, kernels, self.fused, self.wide)

    def wide_at(self, m: int) -> Wide | None:
        """The wide product's sizes for `m` tokens; None: it is not the fastest."""
        return next((sizes for tokens, sizes in self.wide if WIDE_FROM <= m <= tokens), None)


@functools.cache
def default_choice(n: int, k: int) -> LinearChoice:
    """What was fastest on an H200 for matrices of about this shape (docs/log/linear-kernels.md)."""
    kernels = (_default_gemv(n, k), _default_flat(8, n, k), _default_flat(MAX_FLAT_TOKENS, n, k))
    return LinearChoice((1, 8, MAX_FLAT_TOKENS), kernels, default_fused(k))


def default_fused(k: int) -> Fused | None:
    """The fused GEMV's sizes, None for rows that are too wide for it."""
    return Fused(2, 4 if k <= 4096 else 8) if k <= MAX_FUSED_COLUMNS else None


def _default_gemv(n: int, k: int) -> Gemv:
    widest = _power_of_2(k)
    if k > 8192:
        return Gemv(1, 2048, 4, 4)
    if n <= 8192:
        return Gemv(2, min(2048, widest), 1, 4)
    return Gemv(1, min(2048, widest), 0, 8 if widest >= 2048 else 4)


def _default_flat(m: int, n: int, k: int) -> Flat | None:
    """None where the library is faster."""
    if m <= 8:
        if n <= 5000:
            return Flat(64, 128, 5, 2) if k > 8192 else Flat(32, 256, 4, 1)
        if n <= 8192:
            return Flat(64, 128, 5, 1)
        return Flat(64, 128, 4, 1) if n <= 20000 else Flat(128, 128, 3, 1)
    if n <= 5000:
        return Flat(64, 128, 5 if k > 8192 else 4, 2)
    if n <= 8192:
        return Flat(64, 128, 5, 1)
    return None if n <= 20000 else Flat(128, 64, 4, 1)


# -- the table in the profile ------------------------------------------------------------------------

DENSE = "dense"
"""The format of plain 16-bit floats, of either kind."""


class Shape(NamedTuple):
    """What a choice is looked up by: the matrix [n, k], the format of its elements, and how many share a scale."""

    n: int
    k: int
    format: str = DENSE
    group: int = 0

    def __str__(self) -> str:
        written = "" if self.format == DENSE else f" {self.format}" + (f"/{self.group}" if self.group else "")
        return f"{self.n} x {self.k}{written}"


# All tables begin with these. Profiles from before there were formats have n and k alone: their matrices are dense.
KEY = ("n", "k", "format", "group")

# A row has the fastest kernel of one shape at m tokens with its sizes (0 where it has none), and the seconds of the
# best of each implementation (0: not measured, because it cannot do it).
TABLE = "linear"
COLUMNS = (*KEY, "m", "kernel", "rows", "columns", "ahead", "stages", "splits", "warps")
SECONDS = ("gemv_seconds", "flat_seconds", "library_seconds")

# One token through add, norm and the matrix (gated: and the gate): one launch, and the best of one after another.
FUSED_TABLE = "linear.fused"
FUSED_COLUMNS = (*KEY, "gated", "rows", "warps", "fused_seconds", "apart_seconds")

# Several tokens through the matrix (gated: and the gate) by the wide product, and by the best of the others.
WIDE_TABLE = "linear.wide"
WIDE_COLUMNS = (
    *(*KEY, "m", "gated", "tokens", "rows", "stages", "sharing_rows", "sharing_tokens", "parts", "persistent"),
    *("wide_seconds", "other_seconds"),
)

_GEMV, _FLAT, _LIBRARY = "gemv", "flat", "library"


@dataclass(frozen=True, slots=True)
class Timing:
    """The fastest kernel of one shape at `m` tokens, and the best time of each implementation; None: cannot do it."""

    m: int
    kernel: Kernel
    gemv: float | None
    flat: float | None
    library: float

    def row(self, shape: Shape) -> tuple[float | int | str, ...]:
        """As the table has it."""
        kernel = self.kernel
        sizes: tuple[float | int | str, ...]
        if isinstance(kernel, Gemv):
            sizes = (_GEMV, kernel.rows, kernel.block, kernel.ahead, 0, 0, kernel.warps)
        elif isinstance(kernel, Flat):
            sizes = (_FLAT, kernel.rows, kernel.depth, 0, kernel.stages, kernel.splits, kernel.warps)
        else:
            sizes = (_LIBRARY, 0, 0, 0, 0, 0, 0)
        return (*shape, self.m, *sizes, self.gemv or 0.0, self.flat or 0.0, self.library)


@dataclass(frozen=True, slots=True)
class FusedTiming:
    """The best of the fused GEMV's sizes at one token, and the seconds of both ways."""

    gated: bool
    sizes: Fused
    fused: float
    apart: float

    def row(self, shape: Shape) -> tuple[float | int | str, ...]:
        """As the table has it."""
        return (*shape, int(self.gated), self.sizes.rows, self.sizes.warps, self.fused, self.apart)


@dataclass(frozen=True, slots=True)
class WideTiming:
    """The best of the wide product's sizes at `m` tokens, and the seconds of both ways."""

    m: int
    gated: bool
    sizes: Wide
    wide: float
    other: float

    def row(self, shape: Shape) -> tuple[float | int | str, ...]:
        """As the table has it."""
        sizes = (int(size) for size in astuple(self.sizes))
        return (*shape, self.m, int(self.gated), *sizes, self.wide, self.other)


def linear_choices(tables: Mapping[str, Table]) -> dict[Shape, LinearChoice]:
    """From a profile's tables: shape -> what was fastest. Raises ConfigError for rows that make no sense."""
    fused = {shape: t.sizes if t.fused < t.apart else None for shape, t in fused_timings(tables).items()}
    wide = wide_timings(tables)
    found: dict[Shape, LinearChoice] = {}
    for shape, timings in timings_of(tables).items():
        # What has not been measured keeps its default.
        inside = fused[shape] if shape in fused else default_fused(shape.k)
        wides = tuple((t.m, t.sizes if t.wide < DRAW * t.other else None) for t in wide.get(shape, ()))
        found[shape] = LinearChoice(tuple(t.m for t in timings), tuple(t.kernel for t in timings), inside, wides)
    return found


def timings_of(tables: Mapping[str, Table]) -> dict[Shape, list[Timing]]:
    """Shape -> its rows by ascending m."""
    found: dict[Shape, list[Timing]] = {}
    for shape, row in _rows(tables, TABLE, (*COLUMNS, *SECONDS)):
        m, name, rows, columns, ahead, stages, splits, warps, *seconds = row
        gemv, flat, library = (float(s) for s in seconds)
        kernel: Kernel = None
        if name == _GEMV:
            kernel = Gemv(int(rows), int(columns), int(ahead), int(warps))
        elif name == _FLAT:
            kernel = Flat(int(rows), int(columns), int(stages), int(splits), int(warps))
        elif name != _LIBRARY:
            raise ConfigError(f"the profile names a linear kernel {name!r}, but only gemv, flat and library are known.")
        found.setdefault(shape, []).append(Timing(int(m), kernel, gemv or None, flat or None, library))
    return {shape: sorted(timings, key=lambda t: t.m) for shape, timings in found.items()}


def fused_timings(tables: Mapping[str, Table]) -> dict[Shape, FusedTiming]:
    """Shape -> its row."""
    return {
        shape: FusedTiming(bool(gated), Fused(int(rows), int(warps)), float(fused), float(apart))
        for shape, (gated, rows, warps, fused, apart) in _rows(tables, FUSED_TABLE, FUSED_COLUMNS)
    }


def wide_timings(tables: Mapping[str, Table]) -> dict[Shape, list[WideTiming]]:
    """Shape -> its rows by ascending m. Raises ConfigError for sizes that make no sense."""
    found: dict[Shape, list[WideTiming]] = {}
    for shape, row in _rows(tables, WIDE_TABLE, WIDE_COLUMNS):
        m, gated, tokens, rows, stages, sharing_rows, sharing_tokens, parts, persistent, wide, other = row
        made = Wide(
            *(int(tokens), int(rows), int(stages)), int(sharing_rows), int(sharing_tokens), int(parts), bool(persistent)
        )
        found.setdefault(shape, []).append(WideTiming(int(m), bool(gated), made, float(wide), float(other)))
    return {shape: sorted(timings, key=lambda t: t.m) for shape, timings in found.items()}


def tables_with(
    tables: Mapping[str, Table],
    measured: Mapping[Shape, Sequence[Timing]],
    fused: Mapping[Shape, FusedTiming],
    wide: Mapping[Shape, Sequence[WideTiming]],
) -> dict[str, Table]:
    """A profile's tables of linear layers with shapes added; those measured before are replaced."""
    plain = {**timings_of(tables), **measured}
    inside = {**fused_timings(tables), **fused}
    wides = {**wide_timings(tables), **wide}
    return {
        TABLE: Table((*COLUMNS, *SECONDS), tuple(t.row(shape) for shape in sorted(plain) for t in plain[shape])),
        FUSED_TABLE: Table(FUSED_COLUMNS, tuple(inside[shape].row(shape) for shape in sorted(inside))),
        WIDE_TABLE: Table(WIDE_COLUMNS, tuple(t.row(shape) for shape in sorted(wides) for t in wides[shape])),
    }


def inflections(timings: Sequence[Timing]) -> tuple[int | None, int | None]:
    """M1 and M2 of one shape (§5): the fewest measured tokens at which the flat product is faster than the GEMV, and
    from which on the library is faster than the flat product at all measured ones; None: at none.
    """
    first = next((t.m for t in timings if t.flat is not None and (t.gemv is None or t.flat < t.gemv)), None)
    second = None
    for t in reversed(timings):
        if t.flat is not None and t.flat <= t.library:
            break
        second = t.m
    return first, second


def _rows(
    tables: Mapping[str, Table], name: str, columns: tuple[str, ...]
) -> Iterator[tuple[Shape, tuple[float | int | str, ...]]]:
    """The rows of a table, their shapes and the rest."""
    table = tables.get(name)
    if table is None:
        return
    rest = columns[len(KEY) :]
    old = table.columns == ("n", "k", *rest)
    if not old and table.columns != columns:
        raise ConfigError(
            f"the profile's table {name!r} has other columns than {', '.join(columns)}; measure it again."
        )
    for row in table.rows:
        n, k = int(row[0]), int(row[1])
        shape = Shape(n, k) if old else Shape(n, k, str(row[2]), int(row[3]))
        yield shape, row[len(row) - len(rest) :]


def _check(sizes: object, names: Sequence[str], least: int) -> None:
    for name in names:
        value = getattr(sizes, name)
        if value < least or value != _power_of_2(value):
            kind = type(sizes).__name__
            raise ConfigError(f"{name} of a {kind} kernel is {value}; it must be a power of two of at least {least}.")


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
