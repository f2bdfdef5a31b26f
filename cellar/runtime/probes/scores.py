"""Attention scores of a model, layer by layer: may its softmax leave the maximum out (FlashDecoding++ §3)?

    python -m cellar.runtime.probes.scores --model DIRECTORY --output FILE [--base FILE]

adds a model to a profile; `cellar profile --model NAME` does it on an accelerator. The text is the model's own, sampled
at temperature 1, so no data set is needed. What is written per layer: the bounds of 99.99 % of all scores x = scale
q . k (the paper's a and b), the extremes, and what decides: `again`, the share of a decode's tiles whose sum of e^x
leaves the range of the kernel, so that they would be computed once more.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import torch
from torch import Tensor

from cellar.core.hardware import Profile, Table
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.loader import LoadedWeights, Transform, load
from cellar.models.model import Comm, Hidden, Model, run_layer
from cellar.models.quantization import is_linear
from cellar.ops.attention.plan import PIECE
from cellar.ops.attention.triton import UNIFIED_RANGE
from cellar.ops.linear.device import prepare
from cellar.ops.linear.weight import Weight
from cellar.ops.rotary import rope_table, rotary
from cellar.quant.device import on_device
from cellar.runtime.probes.context import ProbeContext

TABLE = "scores"
COLUMNS = ("weights", "model", "layer", "low", "high", "least", "most", "again")
ROWS, LENGTH = 16, 1024

# A tile that is computed again costs about one more pass over its keys; the maximum saves 1 to 2 % (docs/log).
MOST_AGAIN = 0.01
# Share of the scores outside [low, high].
_TAILS = 1e-4
_REACH, _BINS = 1024.0, 16384
_SAMPLE_NBYTES = 2**16


@dataclass(frozen=True, slots=True)
class LayerScores:
    """Natural units: a score enters the softmax as e^x."""

    low: float
    high: float
    least: float
    most: float
    again: float

    @property
    def is_wide(self) -> bool:
        """True if the layer does better with a running maximum."""
        return self.again > MOST_AGAIN


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds the table `scores` with the layers of the context's checkpoint; on an accelerator only: the CPU's attention
    has a maximum anyway.
    """
    if context.accelerator is None or context.checkpoint is None or context.spec is None:
        return profile
    return with_scores(profile, context.checkpoint, context.spec.dtype, context.accelerator, name=context.model)


def with_scores(
    profile: Profile,
    checkpoint: Path,
    dtype: str,
    device: torch.device,
    rows: int = ROWS,
    length: int = LENGTH,
    name: str | None = None,
) -> Profile:
    """The profile with a checkpoint's layers measured over `rows` texts of `length` tokens each."""
    from cellar.models.registry import open_model, read_config

    model = open_model(read_config(checkpoint), dtype)
    weights = load(model.spec, checkpoint, device, prepared(device))
    found = measure_scores(model, weights, device, rows, min(length, model.spec.max_position))
    digest = weights_digest(checkpoint)
    known = profile.tables.get(TABLE)
    kept = [] if known is None else [row for row in known.rows if row[0] != digest]
    added: list[tuple[float | int | str, ...]] = []
    for j, s in enumerate(found):
        bounds = (_short(x) for x in (s.low, s.high, s.least, s.most, s.again))
        added.append((digest, name or checkpoint.name, j, *bounds))
    return profile.merged(tables={TABLE: Table(COLUMNS, (*kept, *added))})


def wide_layers(profiles: Sequence[Profile], checkpoint: Path) -> frozenset[int]:
    """Layers of a checkpoint whose scores are known to be too wide; the first profile that knows it decides."""
    tables = [table for table in (profile.tables.get(TABLE) for profile in profiles) if table is not None]
    if not tables:
        return frozenset()
    digest = weights_digest(checkpoint)
    for table in tables:
        again = {int(row[2]): float(row[-1]) for row in table.rows if row[0] == digest}
        if again:
            return frozenset(j for j, share in again.items() if share > MOST_AGAIN)
    return frozenset()


def weights_digest(checkpoint: Path) -> str:
    """What tells weights apart without reading them all: names, sizes and last bytes of the files."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")) or sorted(checkpoint.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            opened.seek(max(0, size - _SAMPLE_NBYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def measure_scores(
    model: Model, weights: LoadedWeights, device: torch.device, rows: int, length: int, seed: int = 0
) -> list[LayerScores]:
    """The scores of each layer over texts that the model writes."""
    context = GrowingContext(model.spec, device, rows, length, watch=True)
    for _ in written(model, weights, context, length, seed):
        pass
    return [watch.found() for watch in context.watches]


@torch.inference_mode()
def sampled_text(
    model: Model, weights: LoadedWeights, device: torch.device, rows: int, length: int, seed: int
) -> Tensor:
    """Texts that the model writes at temperature 1: int64 [rows, length]."""
    context = GrowingContext(model.spec, device, rows, length)
    return torch.stack(list(written(model, weights, context, length, seed)), 1)


def written(model: Model, weights: LoadedWeights, context: GrowingContext, length: int, seed: int) -> Iterator[Tensor]:
    """Yield the tokens int64 [rows] of each position; the first is the begin symbol, or drawn where there is none."""
    spec, device = model.spec, context.positions.device
    dice = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(spec.vocab_size, context.positions.shape, generator=dice, device=device)
    if spec.bos_token_id is not None:
        tokens.fill_(spec.bos_token_id)
    for position in range(length):
        yield tokens
        context.positions.fill_(position)
        h = forward(model, weights, tokens, context)
        if position + 1 < length:
            tokens = torch.multinomial(model.head(weights.head, h).float().softmax(-1), 1, generator=dice)[:, 0]


def forward(model: Model, weights: LoadedWeights, tokens: Tensor, context: GrowingContext) -> Hidden:
    """One position of every row through all layers."""
    h = model.embed(weights.embedding, tokens, context)
    for j, layer in enumerate(weights.layers):
        h = run_layer(model, j, layer, h, context)
    return h


class GrowingContext:
    """A LayerContext of rows that grow together, one token a step, in plain tensors and float32.

    `watch`: keep account of the scores of each layer in `watches`.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, rows: int, length: int, watch: bool = False) -> None:
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.comm: Comm | None = None
        self.cos_sin = None if spec.rope is None else rope_table(spec.rope, device)
        self.watches = [ScoreWatch(device) for _ in spec.layers] if watch else []
        self._spec = spec
        self._length = length
        self._kv: list[Tensor | None] = [None] * spec.num_layers
        self._filled = [0] * spec.num_layers

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """As in `models/model.py`; q: [rows, heads, head_dim]."""
        if rotate:
            assert self.cos_sin is not None
            q, k = rotary(q, k, self.positions, self.cos_sin)
        rows, kv_heads, dim = k.shape
        cache = self._kv[j]
        if cache is None:
            cache = self._kv[j] = k.new_empty(2, rows, kv_heads, self._length, dim)
        filled = self._filled[j]
        cache[0, :, :, filled], cache[1, :, :, filled] = k, v
        self._filled[j] = filled = filled + 1
        window = self._spec.layers[j].window
        keys, values = cache[:, :, :, 0 if window is None else max(0, filled - window) : filled].float()
        grouped = q.float().reshape(rows, kv_heads, -1, dim)
        scores = grouped @ keys.transpose(-1, -2) * self._spec.head_dim**-0.5
        if self.watches:
            self.watches[j].see(scores)
        out: Tensor = scores.softmax(-1) @ values
        return out.view(q.shape).to(q.dtype)


class ScoreWatch:
    """Account of one layer's scores; nothing is copied to the host before `found`."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.float64, device=device)
        self._least = torch.full((), torch.inf, device=device)
        self._most = torch.full((), -torch.inf, device=device)
        self._again = torch.zeros((), dtype=torch.int64, device=device)
        self._tiles = 0

    def see(self, scores: Tensor) -> None:
        """float32 [rows, KV heads, group, positions], all of them visible: a tile is a group and PIECE positions."""
        self._least = torch.minimum(self._least, scores.min())
        self._most = torch.maximum(self._most, scores.max())
        self._counts += torch.histc(scores.clamp(-_REACH, _REACH), _BINS, -_REACH, _REACH)
        sums = torch.stack([piece.logsumexp(-1) for piece in torch.split(scores, PIECE, -1)], -1)
        again = (sums.abs() >= UNIFIED_RANGE * log(2.0)).any(-2)
        self._again += again.sum()
        self._tiles += again.numel()

    def found(self) -> LayerScores:
        """The account so far; `low` and `high` to an eighth. Call `see` before."""
        shares = (self._counts.cumsum(0) / self._counts.sum()).cpu()
        width = 2 * _REACH / _BINS
        low = int(torch.searchsorted(shares, _TAILS / 2)) * width - _REACH
        high = (int(torch.searchsorted(shares, 1 - _TAILS / 2)) + 1) * width - _REACH
        return LayerScores(low, high, float(self._least), float(self._most), int(self._again) / self._tiles)


def prepared(device: torch.device) -> Transform | None:
    """What loading does to each tensor, so that its products run on the device."""
    if device.type == "cpu":
        return None

    def change(spec: TensorSpec, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return on_device(weight)
        return prepare(weight) if is_linear(spec) else weight

    return change


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    from cellar.models.hub import resolve
    from cellar.models.registry import auto_dtype, read_config
    from cellar.runtime.device import resolve_device
    from cellar.runtime.probes.registry import machine_name

    parser = argparse.ArgumentParser(
        prog="python -m cellar.runtime.probes.scores", description="Add the attention scores of a model to a profile."
    )
    parser.add_argument("--model", required=True, help="directory of a checkpoint, or a hub name")
    parser.add_argument("--output", type=Path, required=True, help="profile to write")
    parser.add_argument("--base", type=Path, help="profile to add to; default: an empty one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=ROWS, help="texts")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of each")
    options = parser.parse_args(arguments)
    if options.rows < 1 or options.length < 1:
        sys.exit(f"rows and length are {options.rows} and {options.length}; both must be at least 1.")
    device, checkpoint = resolve_device(options.device), resolve(options.model)
    dtype = auto_dtype(read_config(checkpoint), device.type) if options.dtype == "auto" else options.dtype
    accelerator = None if device.type == "cpu" else device
    base = Profile(machine_name(accelerator), ()) if options.base is None else Profile.load(options.base)
    profile = with_scores(base, checkpoint, dtype, device, options.rows, options.length, options.model)
    profile.save(options.output)
    digest = weights_digest(checkpoint)
    print(f"{'layer':>5} {'99.99 % of scores':>20} {'all':>20} {'tiles again':>12}  softmax")
    for row in profile.tables[TABLE].rows:
        if row[0] == digest:
            layer, low, high, least, most, again = (float(x) for x in row[2:])
            way = "running maximum" if again > MOST_AGAIN else "unified"
            print(
                f"{layer:5.0f} {low:9.2f} .. {high:7.2f} {least:9.2f} .. {most:7.2f} {again:11.4%}   {way}", flush=True
            )


if __name__ == "__main__":
    main()
