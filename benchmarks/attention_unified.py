"""Softmax without a maximum against the ordinary one: the same kernel, the same run (FlashDecoding++ §3).

    python -m benchmarks.attention --comparison unified --json FILE

- how often a tile is computed again, on the scores of a model that writes its own text (the demo model), and on the
  same scores shifted by +-100 (`attention_recount.py`);
- whether the shift moves a result (it must not: a softmax does not know a constant);
- what the model says: in float32 the same token at every position; in bfloat16, teacher-forced, how far below the best
  logit the token is that the unified softmax chooses, and how many choices differ;
- on an accelerator, the time of a layer with either, and where every tile is computed again.

Without an accelerator the kernel of decodes runs in Triton's interpreter, over less text, and nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention import CHUNK, Shape, by_turns, caches_of, captured, work_of
from benchmarks.attention_recount import Recount, recount
from cellar import demo
from cellar.core.specs import ModelSpec
from cellar.models.loader import LoadedWeights, load
from cellar.models.model import Comm, Model, run_layer
from cellar.models.registry import open_model, read_config
from cellar.ops.attention import AttentionWork, attention, plan_attention
from cellar.ops.attention.triton import attention_kernel, decode_attention_kernel
from cellar.ops.linear.definition import as_linear
from cellar.ops.rotary import rope_table, rotary, write_kv
from cellar.reports.limits import describe
from cellar.runtime.probes.scores import prepared, sampled_text

SHIFTS = (0.0, -100.0, 100.0)
# How far below the best logit a choice may be, and how far a shift may move a result.
MOST_BELOW = 2e-2
MOST_MOVED = {"float32": 5e-4, "bfloat16": 2e-2}
# Dimensions beside the head's own, for the shift; the sum is a size that the kernel knows.
_EXTRA = 16
_LOUD = 8.0
# Programs that an H200 runs at once: tiles are counted as it would cut them.
_PROGRAMS = 264

TIMED = (
    Shape("decode 1x1024", 1, 1024),
    Shape("decode 8x1024", 8, 1024),
    Shape("decode 32x1024", 32, 1024),
    Shape("decode 128x1024", 128, 1024),
    Shape("decode 1x8000", 1, 8000),
    Shape("decode 16x8000", 16, 8000),
    Shape("8 queries 32x1024", 32, 1024, 8),
    Shape("prompt 1024", 1, 1024, 1024),
    Shape("prompt 8000", 1, 8000, 8000),
    Shape("chunk 512 at 8000", 1, 8000, 512),
)


@dataclass(frozen=True)
class Size:
    """How much text: `rows` of `length` tokens, of which the first `prompt` are computed at once."""

    rows: int
    length: int
    prompt: int


ACCELERATOR = Size(rows=32, length=512, prompt=256)
INTERPRETED = Size(rows=4, length=256, prompt=252)


def run(device: torch.device, report: Path | None, checkpoint: Path | None = None, size: Size | None = None) -> int:
    """Measure and tell; 0 if the softmaxes agree as they must."""
    on_cpu = device.type == "cpu"
    size = size or (INTERPRETED if on_cpu else ACCELERATOR)
    checkpoint = checkpoint or demo.path()
    found: dict[str, Any] = {
        "comparison": "unified",
        "machine": describe(device),
        "torch": torch.__version__,
        "model": checkpoint.name,
        "size": asdict(size),
    }
    with torch.inference_mode():
        exact = Subject.open(checkpoint, "float32", device)
        rounded = exact if on_cpu else Subject.open(checkpoint, "bfloat16", device)
        tokens = sampled_text(exact.model, exact.weights, device, size.rows, size.length, seed=1)
        prompts = Prompts(rounded, tokens)
        found["shares"] = prompts.shares()
        layers = 1 if on_cpu else exact.model.spec.num_layers
        found["moved"] = {"dtype": rounded.model.spec.dtype, **prompts.moved(layers)}
        found["float32"], choices = compared(exact, tokens, size)
        found["bfloat16"] = None if on_cpu else compared(rounded, tokens, size, choices)[0]
        found["times"] = [] if on_cpu else times(device, TIMED)
        found["times_float16"] = [] if on_cpu else times(device, TIMED, torch.float16)
    found["wrong"] = wrongs(found)
    for line in lines_of(found):
        print(line)
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


@dataclass(frozen=True)
class Subject:
    """A model in one dtype on one device."""

    model: Model
    weights: LoadedWeights
    device: torch.device

    @classmethod
    def open(cls, checkpoint: Path, dtype: str, device: torch.device) -> Subject:
        """Read a checkpoint."""
        model = open_model(read_config(checkpoint), dtype)
        return cls(model, load(model.spec, checkpoint, device, prepared(device)), device)

    def logits(self, context: ChunkContext, tokens: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """tokens [rows, n] at positions from `start` on -> logits [rows * n, vocab], as the engine has them, and with a
        head in float32 over the same hidden states.
        """
        context.begin(start, start + tokens.shape[1])
        model, weights = self.model, self.weights
        h = model.embed(weights.embedding, tokens.flatten(), context)
        for j, layer in enumerate(weights.layers):
            h = run_layer(model, j, layer, h, context)
        fine = model.final_hidden(weights.head, h).float() @ as_linear(weights.head["lm_head"]).dense().float().T
        return model.head(weights.head, h), fine


class ChunkContext:
    """A LayerContext of rows that go on together, over chunks in no order. Decodes always run the kernel."""

    def __init__(self, subject: Subject, rows: int, length: int, unified: bool = True) -> None:
        spec, device = subject.model.spec, subject.device
        self.spec, self.device, self.unified = spec, device, unified
        chunks = -(-length // CHUNK)
        order = np.random.default_rng(2).permutation(rows * chunks).astype(np.int32)
        self.table = torch.from_numpy(order.reshape(rows, chunks)).to(device)
        shape = (2, rows * chunks, spec.num_kv_heads, CHUNK, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers]
        self.queries: list[Tensor] = []
        self.comm: Comm | None = None
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        self.cos_sin = None if spec.rope is None else rope_table(spec.rope, device)
        self.scale = spec.head_dim**-0.5

    def begin(self, start: int, stop: int) -> None:
        """Positions [start, stop) of every row come next."""
        rows = len(self.table)
        self.work = plan_of(self.spec, np.arange(rows), np.full(rows, start), np.full(rows, stop), self.device)
        self.work.softmax = "unified" if self.unified else "maximum"
        positions = torch.arange(start, stop, device=self.device)
        self.positions = positions.repeat(rows)
        self.slots = (self.table[:, positions // CHUNK].long() * CHUNK + positions % CHUNK).flatten()
        self.queries = []

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """As in `models/model.py`; the turned queries of prompts are kept in `queries`."""
        k_cache, v_cache = self.caches[j]
        cos_sin = self.cos_sin if rotate else None
        if self.work.is_decode:
            return decode_attention_kernel(q, k, v, cos_sin, k_cache, v_cache, self.table, self.work, self.scale)
        if cos_sin is not None:
            q, k = rotary(q, k, self.positions, cos_sin)
        write_kv(k, v, k_cache, v_cache, self.slots)
        self.queries.append(q)
        return attention(q, k_cache, v_cache, self.table, self.work, self.scale)


def plan_of(
    spec: ModelSpec,
    row: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    device: torch.device,
    dim: int | None = None,
    programs: int | None = None,
) -> AttentionWork:
    """A plan of the model's heads."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    work = plan_attention(
        row, start, stop, heads, kv_heads, dim or spec.head_dim, CHUNK, None, device, programs=programs
    )
    work.softmax = "unified"
    return work


class Prompts:
    """Queries, keys and values of a whole text in every layer."""

    def __init__(self, subject: Subject, tokens: Tensor) -> None:
        self._rows, self._length = tokens.shape
        self._spec, self._device = subject.model.spec, subject.device
        self._context = ChunkContext(subject, self._rows, self._length)
        subject.logits(self._context, tokens, 0)
        self._queries = list(self._context.queries)

    def shares(self) -> list[dict[str, Any]]:
        """What is computed again over all layers: decodes at every 32nd position, and whole prompts, by shift."""
        places = np.arange(31, self._length, 32)
        rows = np.arange(self._rows)
        kinds = {
            "decode": (np.repeat(rows, len(places)), np.tile(places, self._rows), np.tile(places + 1, self._rows)),
            "prompt": (rows, 0 * rows, 0 * rows + self._length),
        }
        found = []
        for kind, (row, start, stop) in kinds.items():
            work = plan_of(self._spec, row, start, stop, torch.device("cpu"), programs=_PROGRAMS)
            tokens = row * self._length + start if kind == "decode" else np.arange(self._rows * self._length)
            counts = [Recount() for _ in SHIFTS]
            for j, q in enumerate(self._queries):
                chosen = q[torch.from_numpy(tokens).to(q.device)]
                keys, context = self._context.caches[j][0], self._context
                parts = recount(chosen, keys, context.table, work, context.scale, SHIFTS, kind == "decode")
                for count, part in zip(counts, parts, strict=True):
                    count.add(part)
            found += [{"kind": kind, "shift": by, **asdict(n)} for by, n in zip(SHIFTS, counts, strict=True)]
        return found

    def moved(self, layers: int) -> dict[str, float]:
        """By shift, over some layers: the largest change of a result by it and by leaving the maximum out, as a part of
        the layer's largest result.

        Decodes at the last position; on an accelerator the first row is a prompt instead. A shift of the scores by c is
        one more dimension, in which all queries are 8 and all keys c / (8 scale).
        """
        rows = np.arange(self._rows)
        stop = 0 * rows + self._length
        start = stop - 1
        if self._device.type != "cpu":
            start[0] = 0
        spans = zip(rows, start, stop, strict=True)
        index = np.concatenate([r * self._length + np.arange(a, b) for r, a, b in spans])
        wide = self._spec.head_dim + _EXTRA
        work = plan_of(self._spec, rows, start, stop, self._device, wide)
        found = dict.fromkeys(map(str, SHIFTS), 0.0)
        for j in range(layers):
            q = self._queries[j][torch.from_numpy(index).to(self._device)]
            keys, values = self._context.caches[j]
            values = _extended(values, 0.0)
            table, scale = self._context.table, self._context.scale
            plain = attention_kernel(_extended(q, 0.0), _extended(keys, 0.0), values, table, work.with_maximum, scale)
            for by in SHIFTS:
                shifted = _extended(keys, by / (_LOUD * scale))
                got = attention_kernel(_extended(q, _LOUD), shifted, values, table, work, scale)
                found[str(by)] = max(found[str(by)], float((got - plain).abs().max() / plain.abs().max()))
        return found


def _extended(x: Tensor, value: float) -> Tensor:
    """[..., dim] -> [..., dim + 16], the first of the new ones `value`."""
    more = x.new_zeros((*x.shape[:-1], _EXTRA))
    more[..., 0] = value
    return torch.cat((x, more), -1)


def compared(
    subject: Subject, tokens: Tensor, size: Size, expected: Sequence[Tensor] | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """The same text with either softmax, its end token by token, -> what differs, and the ordinary one's choices.

    `expected`: choices of a more exact computation, against which both are counted.
    """
    contexts = [ChunkContext(subject, tokens.shape[0], tokens.shape[1], unified) for unified in (True, False)]
    found: dict[str, Any] = {}
    choices: list[Tensor] = []
    pieces = [(0, size.prompt), *((p, p + 1) for p in range(size.prompt, size.length - 1))]
    for start, stop in pieces:
        (ours, fine), (theirs, exact) = (subject.logits(c, tokens[:, start:stop], start) for c in contexts)
        choice = theirs.argmax(-1)
        best = exact.amax(-1)
        below = best - exact.gather(-1, fine.argmax(-1, keepdim=True))[:, 0]
        part = found.setdefault("prompt" if start == 0 else "decode", [])
        exacter = choice if expected is None else expected[len(choices)]
        flags = [
            ours.argmax(-1) != choice,
            fine.argmax(-1) != exact.argmax(-1),
            ours.argmax(-1) != exacter,
            choice != exacter,
            below > MOST_BELOW,
        ]
        worst = [below.max(), (below / best.abs()).max(), (fine - exact).abs().max()]
        part.append(torch.stack([*(flag.sum().double() for flag in flags), *(x.double() for x in worst)]))
        choices.append(choice)
    names = ("flips", "flips_fine", "ours_from_exact", "ordinary_from_exact", "too_low")
    for kind, parts in found.items():
        sums = torch.stack(parts)
        counted = {name: int(n) for name, n in zip(names, sums[:, :5].sum(0).tolist(), strict=True)}
        positions = len(tokens) * (size.prompt if kind == "prompt" else size.length - 1 - size.prompt)
        most = dict(zip(("most_below", "most_below_share", "logits_differ"), sums[:, 5:].amax(0).tolist(), strict=True))
        found[kind] = {"positions": positions, **counted, **most}
    return found, choices


def times(device: torch.device, shapes: Sequence[Shape], dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Microseconds of a layer with either softmax, by turns; and the same on scores shifted by 100."""
    found = []
    for shape in shapes:
        chunks = -(-shape.context // CHUNK)
        slots = shape.batch * chunks
        caches = caches_of(shape, slots, device, dtype)
        order = np.random.default_rng(0).permutation(slots).astype(np.int32)
        table = torch.from_numpy(order.reshape(shape.batch, chunks)).to(device)
        q = torch.randn(shape.batch * shape.queries, shape.heads, shape.dim, device=device).to(dtype)
        scale = shape.dim**-0.5
        line: dict[str, Any] = {"name": shape.name}
        work = work_of(shape, np.full(shape.batch, shape.context - shape.queries), device)
        work.softmax = "unified"

        def layers(plan: AttentionWork) -> Callable[[], None]:
            def call() -> None:
                for k, v in caches:  # noqa: B023  called in this turn of the loop
                    attention(q, k, v, table, plan, scale)  # noqa: B023

            return call if device.type == "cpu" else captured(call, device)

        for key in ("", "_shifted"):
            calls = {"unified": layers(work), "maximum": layers(work.with_maximum)}
            taken = by_turns(calls, device)
            line |= {f"{name}{key}": 1e6 * s / len(caches) for name, s in taken.items()}
            q[..., 0] = _LOUD
            for cache in caches:
                cache[0, ..., 0] = SHIFTS[-1] / (_LOUD * scale)
        found.append(line)
    return found


def wrongs(found: dict[str, Any]) -> list[str]:
    """What must be and is not; the choices in bfloat16 are a figure, not a condition."""
    moved, wrong = found["moved"], []
    limit = MOST_MOVED[moved["dtype"]]
    wrong += [f"a shift of {by} moves results by {moved[by]:.1e}" for by in map(str, SHIFTS) if not moved[by] <= limit]
    for kind, part in found["float32"].items():
        if part["flips"]:
            wrong.append(f"{part['flips']} tokens differ in float32 ({kind})")
    return wrong


def lines_of(found: dict[str, Any]) -> list[str]:
    """The tables, for people."""
    size = found["size"]
    lines = [
        f"{found['machine']}, torch {found['torch']}, {found['model']}: {size['rows']} texts of "
        f"{size['length']} tokens",
        "",
        "computed again    shift     tiles     again     share      rows   outside     share",
    ]
    for part in found["shares"]:
        lines.append(
            f"{part['kind']:16} {part['shift']:6.0f} {part['tiles']:9} {part['again']:9} "
            f"{part['again'] / part['tiles']:9.4%} {part['rows']:9} {part['outside']:9} "
            f"{part['outside'] / part['rows']:9.4%}"
        )
    moved = found["moved"]
    lines += ["", f"most that a shift moves a result, of the largest, {moved['dtype']}: "]
    lines[-1] += ", ".join(f"{by}: {moved[by]:.1e}" for by in map(str, SHIFTS))
    for dtype in ("float32", "bfloat16"):
        for kind, part in (found[dtype] or {}).items():
            lines.append(
                f"{dtype}, {kind}: {part['flips']} of {part['positions']} tokens differ ({part['flips_fine']} with a "
                f"head in float32, {part['too_low']} of them more than {MOST_BELOW} below the best logit, the farthest "
                f"{part['most_below']:.4f}, {part['most_below_share']:.2%} of it); logits differ by up to "
                f"{part['logits_differ']:.4f}"
            )
            if dtype == "bfloat16":
                lines.append(
                    f"    from the choices in float32 differ {part['ours_from_exact']} with the unified softmax, "
                    f"{part['ordinary_from_exact']} with the ordinary one"
                )
    for dtype, timed in (("bfloat16", found["times"]), ("float16", found["times_float16"])):
        if timed:
            head = f"us a layer, {dtype}"
            lines += ["", f"{head:20} {'unified':>9} {'maximum':>9} {'gain':>7} {'all again':>10} {'maximum':>9}"]
        for line in timed:
            lines.append(
                f"{line['name']:20} {line['unified']:9.1f} {line['maximum']:9.1f} "
                f"{line['maximum'] / line['unified'] - 1:7.1%} {line['unified_shifted']:10.1f} "
                f"{line['maximum_shifted']:9.1f}"
            )
    return [*lines, *(f"wrong: {one}" for one in found["wrong"])]
