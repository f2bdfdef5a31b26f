"""The loop over layers: one step's tokens through the model, with K and V of every layer written to the arena."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.specs import LayerSpec, ModelSpec
from cellar.models.loader import LoadedWeights
from cellar.models.model import Comm, Hidden, LayerContext, Model, run_layer
from cellar.models.points import whole
from cellar.ops.attention import (
    AttentionShape,
    AttentionWork,
    Softmax,
    attention,
    decode_attention,
    decodes_at_once,
    plan_attention,
)
from cellar.ops.kv_format import format_of
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.ops.rotary import rope_table, rotary_kv, write_kv
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.host_kv import (
    CpuAttention,
    CpuShare,
    DevicePart,
    Divided,
    DividedContext,
    HostKV,
    PartedContext,
    divided,
    wait_for_each_other,
)
from cellar.runtime.offload.staged import MOST_RUNS, CopiedChunks, StagedChunks, StagedContext, Stores, runs_of
from cellar.runtime.pace import Pace
from cellar.runtime.ranks.stages import Stages
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.inputs import LongArray, StepInputs
from cellar.runtime.steps.lanes import InTurn, Lanes, cut
from cellar.runtime.steps.recorded_layers import LaunchedLayers, PassLayers, RecordedLayers, RecordedPass
from cellar.runtime.transfer import uploader

Gate = Callable[[int], None]


class Cache(Protocol):
    """Keys and values by layer, as kernels see them: [slots, kv_heads, chunk_size, head_dim]."""

    @property
    def k(self) -> Sequence[Tensor]:
        """Keys."""

    @property
    def v(self) -> Sequence[Tensor]:
        """Values."""


class StepContext:
    """What the layers of one step share (the LayerContext of `models/model.py`).

    positions: int64 [tokens]. slot_mapping: int64 [tokens]. table: int32 [rows, columns]. works: per layer.
    """

    __slots__ = ("_k", "_scale", "_slot_mapping", "_table", "_v", "_works", "comm", "cos_sin", "positions")

    def __init__(
        self,
        positions: Tensor,
        cos_sin: Tensor | None,
        arena: Cache,
        slot_mapping: Tensor,
        table: Tensor,
        works: list[AttentionWork],
        scale: float,
        comm: Comm | None = None,
    ) -> None:
        self.positions = positions
        self.comm = comm
        self.cos_sin = cos_sin
        self._k = arena.k
        self._v = arena.v
        self._slot_mapping = slot_mapping
        self._table = table
        self._works = works
        self._scale = scale

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Write k, v of all spans, then attend: a span may see what another of its row writes in this step."""
        k_cache, v_cache, work = self._k[j], self._v[j], self._works[j]
        if decodes_at_once(q, k_cache, v_cache, work):
            cos_sin = self.cos_sin if rotate else None
            return decode_attention(q, k, v, cos_sin, k_cache, v_cache, self._table, work, self._scale)
        if rotate:
            assert self.cos_sin is not None
            turned = torch.empty(k.shape, dtype=k.dtype, device=k.device) if work.reads_new else None
            q = rotary_kv(q, k, v, self.positions, self.cos_sin, k_cache, v_cache, self._slot_mapping, turned)
            new = None if turned is None else (turned, v)
        else:
            write_kv(k, v, k_cache, v_cache, self._slot_mapping)
            new = (k, v) if work.shape.kv_format == "plain" else None
        return attention(q, k_cache, v_cache, self._table, work, self._scale, new=new)


class Layers(Protocol):
    """Where the loop gets a layer's weights from."""

    def __len__(self) -> int:
        """Number of layers."""

    def begin(self, num_tokens: int) -> None:
        """A pass over so many tokens begins. It takes all layers, in ascending order."""

    def at(self, j: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """Layer j's weights, there to be used until the block ends."""

    def computing(self) -> AbstractContextManager[None]:
        """While what needs no layer's weights, the head, is computed."""


class Passes(Protocol):
    """What an executor asks of what computes steps: `Forward`, or one rank's part in layouts (`laid.py`).

    What `batches` returns is for `run_batches` alone, and hidden rows are for `logits` and `final_hidden`.
    """

    @property
    def arena(self) -> Arena:
        """K and V."""

    def keep_maximum(self, layers: Collection[int]) -> None:
        """Compute the softmax of these layers with a running maximum."""

    def use_softmax(self, softmax: Softmax) -> None:
        """How all other layers compute their softmax on a GPU."""

    def batches(self, inputs: StepInputs) -> Any:
        """The step, planned."""

    def run_batches(
        self,
        batches: Any,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        pace: Pace | None = None,
        gate: Gate | None = None,
    ) -> Any:
        """Hidden rows after the last layer. `gate` is called with each layer's number before it."""

    def logits(self, h: Any, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, vocab] of the step's tokens `places`, which `index` has on the device; None: of all."""

    def final_hidden(self, h: Any, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, hidden] after the last norm, likewise."""


class ResidentLayers:
    """Implements `Layers` for weights that are there."""

    def __init__(self, layers: Sequence[Mapping[str, Weight]]) -> None:
        self._layers = [nullcontext(weights) for weights in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def begin(self, num_tokens: int) -> None:
        """They are there."""

    def at(self, j: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """Layer j's weights."""
        return self._layers[j]

    def computing(self) -> AbstractContextManager[None]:
        """Nobody counts."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Batch:
    """One GPU batch of a pass: tokens [start, stop), and their attention work, one for each of `Forward.shapes`.

    `divided`: the work where the cache lies in host memory. `lanes`: where it is a micro-batch beside others.
    """

    start: int
    stop: int
    works: Sequence[AttentionWork]
    divided: Divided | None = None
    lanes: Lanes | None = None


class Forward:
    """A model with its weights and its arena, ready to compute steps.

    `comm`: the other ranks, if these are the weights of one rank of several (`models/sharding.py`). `layers`: where the
    layers' weights come from, if not from `weights`. `batch`: so many sequences pass a layer together, then the next
    ones, before the pass goes on to the next layer (FlexGen §4.2, the zig-zag block); None: all of them.
    `sparse_v`: the share of values that the CPU's attention reads; None: all. `stages`: where hidden rows come from
    and go to, if these are the layers of one stage of several. `jobs`: what the CPU does for the device, if anything.
    `lanes`: where the micro-batches of long steps run side by side; None: steps are not cut.
    """

    def __init__(
        self,
        model: Model,
        weights: LoadedWeights,
        arena: Arena,
        device: torch.device,
        comm: Comm | None = None,
        layers: Layers | None = None,
        batch: int | None = None,
        sparse_v: float | None = None,
        stages: Stages | None = None,
        jobs: CpuJobs | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self._jobs = jobs
        self._comm = comm
        self._lanes = lanes if stages is None and layers is None else None
        self._stages = stages
        self._layers: Layers = ResidentLayers(weights.layers) if layers is None else layers
        self._batch = batch
        self._sparse_v = sparse_v
        self.model = model
        self.weights = weights
        self.arena = arena
        spec: ModelSpec = model.spec
        self._cos_sin = None if spec.rope is None else rope_table(spec.rope, device)
        self._scale = spec.head_dim**-0.5
        self._device = device
        self._upload = uploader(device)
        # Layers of equal shape and window share one plan of attention work.
        shapes = [
            AttentionShape(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                arena.chunk_size,
                layer.window,
                format_of(keys),
            )
            for layer, keys in zip(spec.layers, arena.k, strict=True)
        ]
        self._early = min(map(asks_ahead, spec.layers, weights.layers), default=0) if layers is None else 0
        self.shapes = list(dict.fromkeys(shapes))
        self._shape_of_layer = [self.shapes.index(shape) for shape in shapes]
        self._cpu: CpuAttention | None = None
        self._over_link = 0.0
        self._stores: Stores | None = None
        self._brings = any(shape.kv_format != "plain" for shape in self.shapes)
        self._table_host: NDArray[np.int32] | None = None
        self._wide_layers: frozenset[int] = frozenset()
        self._softmax: Softmax = "auto"
        self._recorded: RecordedLayers | None = None

    def keep_maximum(self, layers: Collection[int]) -> None:
        """Compute the softmax of these layers with a running maximum: a profile found their scores too wide.

        Say so before steps are captured.
        """
        self._wide_layers = frozenset(layers)

    def use_softmax(self, softmax: Softmax) -> None:
        """How all other layers compute their softmax on a GPU. Say so before steps are captured."""
        self._softmax = softmax

    def attend_in_host(self, host: HostKV, table: NDArray[np.int32]) -> None:
        """The cache lies in host memory; `table` is the host's slot table, as it is when steps are planned."""
        self._table_host, self._over_link, self._stores = table, host.over_link, host.stores
        if host.by_cpu:
            self._cpu = CpuAttention(host, self._cos_sin, self._scale, self._device, self._jobs)

    def record_layers(self, recorded: RecordedLayers) -> None:
        """Passes of few tokens have graphs of their layers; on one device alone."""
        assert self._comm is None, "they hold no sums over ranks"
        self._recorded = recorded

    def plan(self, inputs: StepInputs) -> list[AttentionWork]:
        """The attention work of a step, one for each of `shapes`."""
        return self.plan_spans(inputs.row, inputs.start, inputs.stop)

    def plan_spans(
        self, row: NDArray[np.int32], start: NDArray[np.int32], stop: NDArray[np.int32]
    ) -> list[AttentionWork]:
        """The attention work of some spans."""
        return self._works(row, start, stop, self._device)

    def cuts(self, tokens: int) -> bool:
        """Whether a step of so many is cut into micro-batches."""
        return self._lanes is not None and len(self._lanes.sizes(tokens)) > 1

    def batches(self, inputs: StepInputs) -> list[Batch]:
        """The step in GPU batches, in which a sequence's spans stay together, or in micro-batches, which cut them."""
        sizes = [inputs.num_tokens] if self._lanes is None else self._lanes.sizes(inputs.num_tokens)
        if len(sizes) > 1:
            ends = np.cumsum(sizes).tolist()
            return [
                Batch(end - size, end, self._works(*spans, self._device), lanes=self._lanes)
                for size, end, spans in zip(sizes, ends, cut(inputs, sizes), strict=True)
            ]
        # The CPU may be at this step still when the next one has changed the table.
        table = None if self._table_host is None else self._table_host.copy()
        if not inputs.num_tokens or (self._batch is None and self._cpu is None):
            return [self._planned(inputs, slice(None), 0, inputs.num_tokens, table, self._over_link)]
        ends = np.cumsum(inputs.stop - inputs.start)
        # The spans with which a sequence begins; every so many of them a batch does.
        begins = np.flatnonzero(np.diff(inputs.row, prepend=-1))
        # All ranks that share a layer have the same batches, whoever attends to what on each.
        apart = 0 if self._cpu is None or self._comm is not None else leading_decodes(inputs)
        each = self._batch or max(1, len(begins))
        first = [*begins[begins < apart][::each].tolist(), *begins[begins >= apart][::each].tolist()]
        found, start = [], 0
        for begin, end in zip(first, [*first[1:], len(ends)], strict=True):
            stop = int(ends[end - 1])
            over_link = self._over_link if apart in (0, len(ends)) else 0.0
            found.append(self._planned(inputs, slice(begin, end), start, stop, table, over_link))
            start = stop
        return found

    def _planned(
        self,
        inputs: StepInputs,
        spans: slice,
        start: int,
        stop: int,
        table: NDArray[np.int32] | None,
        over_link: float,
    ) -> Batch:
        own = inputs.row[spans], inputs.start[spans], inputs.stop[spans]
        if table is None:
            return Batch(start, stop, self._works(*own, self._device))
        size, by_cpu, brings = self.arena.chunk_size, self._cpu is not None, self._brings
        share = divided(*own, table, size, self._works, self._device, by_cpu, over_link, brings)
        return Batch(start, stop, (), share)

    def _works(
        self, row: NDArray[np.int32], start: NDArray[np.int32], stop: NDArray[np.int32], device: torch.device
    ) -> list[AttentionWork]:
        return [
            plan_attention(
                row,
                start,
                stop,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                chunk_size=shape.chunk_size,
                window=shape.window,
                device=device,
                kv_format=shape.kv_format,
                sparse_v=self._sparse_v if device.type == "cpu" else None,
                upload=self._upload if device == self._device else None,
            )
            for shape in self.shapes
        ]

    def run(
        self,
        planned: Sequence[AttentionWork],
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        pace: Pace | None = None,
        gate: Gate | None = None,
        kind: str = "",
    ) -> Hidden:
        """The hidden state after the last layer, of all tokens of the step: [tokens, hidden]. `planned` by `plan`.

        Each layer is a lap of `pace`; `gate` is called with its number before it. `kind`: see `RecordedLayers.of`.
        """
        return self.passed([(tokens, self.context(planned, positions, slot_mapping, table))], pace, gate, kind)

    def context(
        self, planned: Sequence[AttentionWork], positions: Tensor, slot_mapping: Tensor, table: Tensor
    ) -> StepContext:
        """What the layers share in a step whose attention is `planned` and whose cache is the arena."""
        return self._context(planned, self.arena, positions, slot_mapping, table, self._comm)

    def run_batches(
        self,
        batches: Sequence[Batch],
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        pace: Pace | None = None,
        gate: Gate | None = None,
    ) -> Hidden:
        """`run`, in GPU batches. `gate` is called with each layer's number before it."""
        lanes = batches[0].lanes
        soon = wait_for_each_other([batch.divided for batch in batches if batch.divided is not None])
        parts: list[tuple[Tensor, LayerContext]] = []
        for k, batch in enumerate(batches):
            part = slice(batch.start, batch.stop)
            if batch.divided is None:
                comm = self._comm if lanes is None else lanes.comm(k)
                context: LayerContext = self._context(
                    batch.works, self.arena, positions[part], slot_mapping[part], table, comm
                )
            else:
                context = self._divided(batch.divided, k, positions[part], slot_mapping[part], table, soon)
            parts.append((tokens[part], context))
        if lanes is not None:
            return _joined(self._passed_in_lanes(lanes, parts, gate))
        try:
            return self.passed(parts, pace, gate)
        finally:
            if self._stores is not None:
                self._stores.wait()

    def _divided(
        self, parts: Divided, number: int, positions: Tensor, slot_mapping: Tensor, table: Tensor, soon: bool
    ) -> LayerContext:
        """Attention where the cache lies, of the pass's GPU batch `number`. `soon`: see `CopiedChunks`."""
        arrays: list[NDArray[Any]] = [parts.tokens, parts.rest]
        for part in parts.parts:
            arrays += [part.tokens]
            if part.staged is not None:
                arrays += [part.staged.slots, part.staged.mapping, part.staged.table]
                arrays += [] if part.staged.grown is None else [part.staged.grown]
        arrived = iter(self._upload(arrays))
        tokens, rest = next(arrived), next(arrived)
        own, own_mapping = positions, slot_mapping
        if parts.cpu_works and parts.parts:
            own, own_mapping = positions.index_select(0, rest), slot_mapping.index_select(0, rest)
        found = [self._attending(part, arrived, own, own_mapping, table, soon) for part in parts.parts]
        inner: LayerContext | None = found[0][1] if found else None
        if len(found) > 1:
            inner = PartedContext(found, own, self._cos_sin, self._comm)
        if not parts.cpu_works:
            assert inner is not None, "a batch has tokens"
            return inner
        assert self._cpu is not None
        works = [parts.cpu_works[shape] for shape in self._shape_of_layer]
        share = CpuShare(self._cpu, works, torch.from_numpy(parts.table), tokens, rest, number)
        return DividedContext(share, inner, positions, self._cos_sin, self._comm)

    def _attending(
        self,
        part: DevicePart,
        arrived: Iterator[Tensor],
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        soon: bool,
    ) -> tuple[Tensor | slice, LayerContext]:
        """The tokens of a part of what the device attends to, and their attention. `arrived` brings its arrays."""
        tokens = next(arrived)
        own = _run_of(part.tokens) or tokens
        if part.staged is None:
            return own, self._context(part.works, self.arena, positions[own], slot_mapping[own], table, self._comm)
        slots, mapping, numbers = next(arrived), next(arrived), next(arrived)
        if part.staged.grown is not None:
            chunks = StagedChunks(self.arena, slots, next(arrived))
        elif self._stores is None or len(runs := runs_of(part.staged.slots)) > MOST_RUNS:
            chunks = StagedChunks(self.arena, slots)
        else:
            chunks = CopiedChunks(self.arena, slots, self._stores, runs, soon=soon)
        return own, StagedContext(
            self._context(part.works, chunks, positions[own], mapping, numbers, self._comm), chunks
        )

    def _context(
        self,
        planned: Sequence[AttentionWork],
        arena: Cache,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        comm: Comm | None,
    ) -> StepContext:
        for work in planned:
            work.softmax, work.early = self._softmax, self._early
        works = [planned[shape] for shape in self._shape_of_layer]
        for j in self._wide_layers:
            works[j] = works[j].with_maximum
        return StepContext(positions, self._cos_sin, arena, slot_mapping, table, works, self._scale, comm)

    def passed(
        self,
        batches: Sequence[tuple[Tensor, LayerContext]],
        pace: Pace | None,
        gate: Gate | None = None,
        kind: str = "",
    ) -> Hidden:
        """All batches through the model, layer by layer: while a layer's weights are there, all use them."""
        hidden = self._entered(batches)
        passes, recorded = self._layers_of(hidden, kind)
        self._layers.begin(sum(len(tokens) for tokens, _ in batches))
        contexts = [context for _, context in batches]
        # All ranks that share a layer take its batches in one order.
        beside = self._comm is None and len(batches) > 1
        late = {k: context for k, context in enumerate(contexts) if beside and isinstance(context, DividedContext)}
        begin_part = (lambda: None) if self._jobs is None else self._jobs.part
        rotate = self.model.spec.rope is not None
        for j in range(len(self._layers)):
            if gate is not None:
                gate(j)
            with self._layers.at(j) as layer_weights:
                pass_layer(passes, j, layer_weights, hidden, contexts, late, begin_part, rotate=rotate)
            if pace is not None:
                pace.lap()
        for k, one in recorded.items():
            hidden[k] = one.left(hidden[k])
        found = _joined([whole(h, self._comm) for h in hidden])
        if self._stages is not None and not self._stages.is_last:
            self._stages.send(found)
        return found

    def _layers_of(self, hidden: list[Hidden], kind: str) -> tuple[list[PassLayers], dict[int, RecordedPass]]:
        """What computes each batch's layers; the first one of few tokens has graphs, and goes in at their door."""
        passes: list[PassLayers] = [LaunchedLayers(self.model)] * len(hidden)
        for k, h in enumerate(hidden):
            if self._recorded is not None and self._recorded.takes(len(h.residual)):
                passes[k] = found = self._recorded.of(h, kind)
                hidden[k] = found.hidden
                return passes, {k: found}
        return passes, {}

    def _passed_in_lanes(
        self, lanes: Lanes, batches: Sequence[tuple[Tensor, LayerContext]], gate: Gate | None
    ) -> list[Hidden]:
        """`passed` by micro-batches side by side."""
        contexts = [InTurn(context, lanes, k) for k, (_, context) in enumerate(batches)]
        hidden: list[Hidden] = []
        with lanes.step():
            for k, context in enumerate(contexts):
                with lanes.at(k):
                    hidden.append(self.model.embed(self.weights.embedding, batches[k][0], context))
            for j, weights in enumerate(self.weights.layers):
                for k, context in enumerate(contexts):
                    with lanes.at(k):
                        if gate is not None:
                            gate(j)
                        hidden[k] = run_layer(self.model, j, weights, hidden[k], context)
            for k in range(len(contexts)):
                with lanes.at(k):
                    hidden[k] = lanes.whole(k, hidden[k])
        return hidden

    def _entered(self, batches: Sequence[tuple[Tensor, LayerContext]]) -> list[Hidden]:
        """What the first layer here takes, of each batch. Stages may cut their steps differently."""
        if self._stages is None or self._stages.is_first:
            return [self.model.embed(self.weights.embedding, tokens, context) for tokens, context in batches]
        sizes = [len(tokens) for tokens, _ in batches]
        residual, delta = self._stages.receive(sum(sizes), self._device)[:2]
        assert delta is not None, "stages send both"
        parts = zip(residual.split_with_sizes(sizes), delta.split_with_sizes(sizes), strict=True)
        return [Hidden(*part) for part in parts]

    def logits(self, h: Hidden, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, vocab] of the step's tokens `places`, which `index` has on the device; None: of all."""
        with self._layers.computing():
            return self.model.head(self.weights.head, h if index is None else select(h, index), self._comm)

    def final_hidden(self, h: Hidden, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, hidden] after the last norm, likewise."""
        return self.model.final_hidden(self.weights.head, h if index is None else select(h, index))


def _run_of(places: LongArray) -> slice | None:
    """The same as a slice, if they follow each other: ascending int64 [n], n >= 1."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else None


def leading_decodes(inputs: StepInputs) -> int:
    """How many spans in front are decodes, of rows that have no other span."""
    decodes = (inputs.stop - inputs.start == 1) & (inputs.start > 0)
    count = len(decodes) if decodes.all() else int(np.argmin(decodes))
    while 0 < count < len(decodes) and inputs.row[count - 1] == inputs.row[count]:
        count -= 1
    return count


def pass_layer(
    passes: Sequence[PassLayers],
    j: int,
    weights: Mapping[str, Weight],
    hidden: list[Hidden],
    contexts: Sequence[LayerContext],
    late: Mapping[int, DividedContext],
    begin_part: Callable[[], None],
    *,
    rotate: bool,
) -> None:
    """Layer j of all batches, each by its own of `passes`. Those that are `late` wait for the CPU's attention: it is
    begun first, and the others are computed beside it. `begin_part` is called before each. `rotate`: see
    `LayerContext`.
    """
    begun = []
    for k, late_context in late.items():
        begin_part()
        q, keys, values, carried = passes[k].before_attention(j, weights, hidden[k], late_context)
        begun.append((k, carried, late_context.begin(j, q, keys, values, rotate=rotate)))
    for k, context in enumerate(contexts):
        if k not in late:
            begin_part()
            hidden[k] = passes[k].layer(j, weights, hidden[k], context)
    for k, carried, come in begun:
        hidden[k] = passes[k].after_attention(j, weights, carried, come(), contexts[k])


def asks_ahead(layer: LayerSpec, weights: Mapping[str, Weight]) -> int:
    """Up to how many tokens the product behind a layer's attention, which takes what the heads made, asks for its
    weights ahead.
    """
    behind = next((weights.get(tensor.name) for tensor in layer.tensors if tensor.axes[-1] == "heads"), None)
    return behind.asks_ahead if isinstance(behind, LinearWeight) else 0


def _joined(found: Sequence[Hidden]) -> Hidden:
    """One under another."""
    if len(found) == 1:
        return found[0]
    deltas = [h.delta for h in found if h.delta is not None]
    return Hidden(torch.cat([h.residual for h in found]), torch.cat(deltas) if deltas else None)


def select(h: Hidden, index: Tensor) -> Hidden:
    """Some rows of a hidden state. index: int64 [n]."""
    delta = None if h.delta is None else h.delta.index_select(0, index)
    return Hidden(h.residual.index_select(0, index), delta)
