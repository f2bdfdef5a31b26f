"""How a transformer block is laid over a mesh of chips: each layout as a program in the sharding algebra.

Letters: B batch, L new tokens of a sequence, S tokens of its context, E embed, F the MLP's width, G 2 if it is gated
(else 1), H query heads, K heads of K and V, D a head's dimension, N the numbers that a norm sums up per token, V words.
Stored weights are the same for every layout (the vocabulary, of table and head, lies over zyx),

    w_in E_xGF_zy    w_out F_zyE_x    w_q E_xH_zyD    w_k, w_v E_xK_(prefix of zy that divides K)D    w_o H_zyDE_x

so prefill and decode may use different layouts of one stored model. With `gather` = g of "", x, xy, xyz the batch is
cut over g and the weights are gathered over g before use (Pope et al.: weight-stationary, X, XY, XYZ weight-gathered).
Weight-stationary with one chip along x is 1D, else 2D. Attention spreads the other axes over heads first (`head_axes`),
then over the batch: all of them heads is the paper's by-heads, none is by-batch, a part is for grouped-query attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from cellar.core.layouts import Layout, Mesh, relay
from cellar.planner import sharding
from cellar.planner.sharding import Kind, Sharded


@dataclass(frozen=True, slots=True)
class Move:
    """A collective on register `name`. `fused`: sent together with the move before it, at no further latency."""

    kind: Kind
    name: str
    axes: str
    before: Sharded
    after: Sharded
    dim: str = ""
    target: str = ""
    weight: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """out = a times b, summed over the dimensions that out lacks."""

    out: str
    a: str
    b: str
    left: Sharded
    right: Sharded
    result: Sharded


@dataclass(frozen=True, slots=True)
class Local:
    """Something that each chip does with what it has: norm, activate, attend, add, and so on."""

    what: str
    out: str
    inputs: tuple[str, ...]
    result: Sharded


Statement = Move | Product | Local


@dataclass(frozen=True)
class Program:
    """A block's statements over named registers; `inputs` are the registers there before, weights among them."""

    statements: tuple[Statement, ...]
    inputs: dict[str, Sharded] = field(hash=False)
    weights: frozenset[str]
    output: str

    def moves(self) -> tuple[Move, ...]:
        """The collectives, slices left out."""
        return tuple(s for s in self.statements if isinstance(s, Move) and s.kind is not Kind.SLICE)


class _Builder:
    """Registers with their shardings, and the statements so far."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.inputs: dict[str, Sharded] = {}
        self.weights: set[str] = set()
        self.now: dict[str, Sharded] = {}

    def input(self, name: str, text: str, weight: bool = False) -> None:
        self.inputs[name] = self.now[name] = Sharded.parse(text)
        if weight:
            self.weights.add(name)

    def _move(self, kind: Kind, name: str, axes: str, after: Sharded, dim: str, target: str, fused: bool) -> None:
        before, self.now[name] = self.now[name], after
        weight = name in self.weights
        self.statements.append(Move(kind, name, axes, before, after, dim, target, weight, fused))

    def gather(self, name: str, dim: str, axes: str, fused: bool = False) -> None:
        if axes:
            after = sharding.all_gather(self.now[name], dim, axes)
            self._move(Kind.ALL_GATHER, name, axes, after, dim, "", fused)

    def scatter(self, name: str, dim: str, axes: str, fused: bool = False) -> None:
        if axes:
            after = sharding.reduce_scatter(self.now[name], dim, axes)
            self._move(Kind.REDUCE_SCATTER, name, axes, after, dim, "", fused)

    def sum(self, name: str, axes: str, fused: bool = False) -> None:
        if axes:
            after = sharding.all_reduce(self.now[name], axes)
            self._move(Kind.ALL_REDUCE, name, axes, after, "", "", fused)

    def turn(self, name: str, dim: str, target: str, axes: str, fused: bool = False) -> None:
        if axes:
            after = sharding.all_to_all(self.now[name], dim, target, axes)
            self._move(Kind.ALL_TO_ALL, name, axes, after, dim, target, fused)

    def cut(self, name: str, dim: str, axes: str) -> None:
        if axes:
            self._move(Kind.SLICE, name, axes, sharding.cut(self.now[name], dim, axes), dim, "", False)

    def product(self, out: str, a: str, b: str, dims: str) -> None:
        result = sharding.contract(self.now[a], self.now[b], dims)
        self.statements.append(Product(out, a, b, self.now[a], self.now[b], result))
        self.now[out] = result

    def local(self, what: str, out: str, inputs: tuple[str, ...], result: Sharded) -> None:
        self.statements.append(Local(what, out, inputs, result))
        self.now[out] = result

    def finish(self, output: str) -> Program:
        return Program(tuple(self.statements), self.inputs, frozenset(self.weights), output)


def stream_axes(layout: Layout) -> str:
    """How the residual stream lies between blocks, e.g. `BLE_xzy` or `B_xyLE_z`."""
    g, embed = layout.gather, layout.stream
    return f"B{'_' + g if g else ''}LE{'_' + embed if embed else ''}"


def _enter(b: _Builder, layout: Layout, source: str, out: str, normed: bool) -> None:
    """out = norm(source), gathered over all axes but x."""
    b.local("copy", out, (source,), b.now[source])
    b.gather(out, "E", layout.rest)
    if not normed:
        return
    whole = b.now[out]
    sums = Sharded("BLN", (whole.of("B"), whole.of("L"), ""), whole.of("E"))
    b.local("norm_sums", "sums", (out,), sums)
    b.sum("sums", sums.partial)
    b.local("norm", out, (out, "sums"), whole)


def _mlp(b: _Builder, layout: Layout, source: str, out: str, fused: bool) -> None:
    """out = w_out(activate(w_in(source))), a partial sum over `rest`."""
    g, x = layout.gather, "" if layout.gather else "x"
    taken = "".join(a for a in "zy" if a in g)
    b.input("w_in", "E_xGF_zy", weight=True)
    b.input("w_out", "F_zyE_x", weight=True)
    for name, fuse in (("w_in", False), ("w_out", True)):
        if g:
            b.gather(name, "E", "x", fuse)
            b.gather(name, "F", taken, True)
    b.product("h", source, "w_in", "BLGF")
    b.scatter("h", "F", x, fused)
    after = b.now["h"]
    b.local("activate", "f", ("h",), Sharded("BLF", (after.of("B"), after.of("L"), after.of("F")), after.partial))
    b.gather("f", "F", x, fused)
    b.product(out, "f", "w_out", "BLE")


def _attention(b: _Builder, layout: Layout, kv_heads: int, source: str, out: str) -> None:
    """out = w_o(attend(w_q, w_k, w_v of source)), a partial sum over `rest`. Caches `k_cache`, `v_cache` grow by L."""
    g, x = layout.gather, "" if layout.gather else "x"
    taken = "".join(a for a in "zy" if a in g)
    stored = layout.stored_kv_axes(kv_heads)
    held = "".join(a for a in stored if a not in g)
    kv_axes, to_batch = layout.kv_axes(kv_heads), layout.to_batch
    b.input("w_q", "E_xH_zyD", weight=True)
    b.input("w_o", "H_zyDE_x", weight=True)
    for name in ("w_k", "w_v"):
        b.input(name, f"E_xK{'_' + stored if stored else ''}D", weight=True)
    if g:
        for name, dim in (("w_q", "H"), ("w_o", "H"), ("w_k", "K"), ("w_v", "K")):
            b.gather(name, "E", "x", True)
            b.gather(name, dim, taken if dim == "H" else "".join(a for a in stored if a in g), True)
    b.product("q", source, "w_q", "BLHD")
    b.scatter("q", "H", x)
    b.turn("q", "H", "B", to_batch)
    for name in ("k", "v"):
        b.product(name, source, f"w_{name}", "BLKD")
        b.turn(name, "K", "B", "".join(a for a in held if a in to_batch), True)
        for axis in layout.rest:
            if axis not in held:
                if axis in to_batch:
                    b.cut(name, "B", axis)
                elif axis in kv_axes:
                    b.cut(name, "K", axis)
        if x and x in to_batch:
            b.scatter(name, "B", x, True)
        elif x and x in kv_axes:
            b.scatter(name, "K", x, True)
        elif x:
            b.sum(name, x, True)
        cache = b.now[name]
        text = Sharded("BSKD", (cache.of("B"), "", cache.of("K"), ""))
        b.input(f"{name}_cache", str(text))
    b.local("attend", "a", ("q", "k", "v", "k_cache", "v_cache"), b.now["q"])
    b.turn("a", "B", "H", to_batch)
    b.gather("a", "H", x)
    b.product(out, "a", "w_o", "BLE")


@lru_cache(maxsize=4096)
def mlp_program(layout: Layout, normed: bool = False) -> Program:
    """The MLP alone: y = w_out(activate(w_in(x))), `x` and `y` laid as the residual stream."""
    b = _Builder()
    b.input("x", stream_axes(layout))
    _enter(b, layout, "x", "n", normed)
    _mlp(b, layout, "n", "y", fused=False)
    b.scatter("y", "E", layout.rest)
    return b.finish("y")


@lru_cache(maxsize=16384)
def block_program(layout: Layout, kv_heads: int, parallel: bool) -> Program:
    """A whole block. Parallel: x + attend(norm x) + mlp(norm x); serial: the MLP after the attention's residual."""
    b = _Builder()
    b.input("x", stream_axes(layout))
    _enter(b, layout, "x", "n", normed=True)
    if parallel:
        _attention(b, layout, kv_heads, "n", "o")
        _mlp(b, layout, "n", "m", fused=True)
        b.local("add", "y", ("o", "m"), b.now["o"])
        b.scatter("y", "E", layout.rest)
        b.local("add", "x2", ("x", "y"), b.now["x"])
        return b.finish("x2")
    _attention(b, layout, kv_heads, "n", "o")
    b.scatter("o", "E", layout.rest)
    b.local("add", "x1", ("x", "o"), b.now["x"])
    _enter(b, layout, "x1", "n1", normed=True)
    _mlp(b, layout, "n1", "m", fused=False)
    b.scatter("m", "E", layout.rest)
    b.local("add", "x2", ("x1", "m"), b.now["x"])
    return b.finish("x2")


@lru_cache(maxsize=256)
def embed_program(layout: Layout, words: str = "E", norm_last: bool = False) -> Program:
    """The residual stream from the table of words: each chip looks up the words that it has, the others are zeros.

    `words` W: they are narrower than E, and whole where they are projected. `norm_last`: a block norms what it leaves,
    not what it takes, and the first one takes the stream gathered.
    """
    b = _Builder()
    b.input("table", f"V_zyx{words}", weight=True)
    b.local("look_up", "words", ("table",), Sharded(f"BL{words}", ("", "", ""), "zyx"))
    b.scatter("words", "B", layout.gather)
    if words == "E":
        b.scatter("words", "E", layout.stream)
    else:
        b.sum("words", layout.stream)
        b.local("project", "words", ("words",), Sharded.parse(stream_axes(layout)))
    if norm_last:
        b.gather("words", "E", layout.rest)
    return b.finish("words")


@lru_cache(maxsize=256)
def head_program(layout: Layout, norm_last: bool = False) -> Program:
    """Logits of every row on every chip, from the residual stream of the rows that are sampled (L is 1).

    `norm_last`: the last block has normed, and gathered, what is taken here.
    """
    b = _Builder()
    b.input("x", stream_axes(layout))
    b.input("lm_head", "V_zyxE", weight=True)
    if norm_last:
        b.local("copy", "n", ("x",), sharding.all_gather(b.now["x"], "E", layout.rest) if layout.rest else b.now["x"])
    else:
        _enter(b, layout, "x", "n", normed=True)
    b.gather("n", "E", "" if layout.gather else "x")
    b.gather("n", "B", layout.gather)
    b.product("logits", "n", "lm_head", "BLV")
    b.gather("logits", "V", "zyx")
    return b.finish("logits")


def relay_moves(source: Layout, target: Layout, kv_heads: int) -> tuple[Move, ...]:
    """The collectives that bring a cache `BSKD` from one layout to another (`core.layouts.relay`)."""
    axes, kv = source.batch_axes, source.kv_axes(kv_heads)
    found = []
    for step in relay(source, target, kv_heads):
        before = Sharded("BSKD", (axes, "", kv, ""))
        axes = axes.replace(step.axis, "") + (step.axis if step.after == "B" else "")
        kv = kv.replace(step.axis, "") + (step.axis if step.after == "K" else "")
        kind = Kind.ALL_TO_ALL if step.before and step.after else Kind.ALL_GATHER if step.before else Kind.SLICE
        found.append(Move(kind, "kv", step.axis, before, Sharded("BSKD", (axes, "", kv, "")), step.before, step.after))
    return tuple(found)


def communication(program: Program, sizes: dict[str, float], mesh: Mesh) -> tuple[float, float]:
    """Elements that each chip sends: (activations, weights)."""
    sent = [0.0, 0.0]
    for move in program.moves():
        sent[move.weight] += sharding.volume(move.kind, move.before, move.after, move.axes, sizes, mesh)
    return sent[0], sent[1]
