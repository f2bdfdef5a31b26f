"""LaidForward: one rank's part of steps in the layouts of an engine (Pope et al. §3), and the order of their tokens.

A step's tokens come in the order of its plan. Where the batch is cut, each row has a home, and the layout wants the
tokens ordered by it; what is computed for the head goes back to the plan's order. Rows are dealt out to homes in equal
runs: row r is at home in r // (rows / homes), and its slots are numbers of its home's arena.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.layouts import Layout
from cellar.models.laid import Laid
from cellar.models.loader import LoadedWeights
from cellar.models.loop import Loop
from cellar.models.model import Comm, Hidden, LayerContext, Model
from cellar.models.points import whole_rows
from cellar.models.views import View, laid, laid_spec
from cellar.ops.attention import AttentionWork, Softmax
from cellar.runtime.pace import Pace
from cellar.runtime.ranks.place import LaidRank
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.forward import Forward, Gate, select
from cellar.runtime.steps.inputs import LongArray, StepInputs
from cellar.runtime.transfer import uploader


@dataclass(frozen=True)
class _Side:
    """One layout: its model, weights and attention (`forward`), and where each home lies in its batch."""

    layout: Layout
    laid: Laid
    forward: Forward
    places: NDArray[np.int64]


@dataclass(frozen=True)
class LaidStep:
    """A step in its layout's order. `order` [tokens]: which token of the plan comes when; None: as they are.

    `counts`: tokens of each place; `group` and `own`: the range of tokens that this rank multiplies, and of those among
    them that its attention has, as planned in `works`.
    """

    side: _Side
    order: LongArray | None
    place: LongArray
    counts: NDArray[np.int64]
    group: slice
    own: slice
    works: Sequence[AttentionWork]


@dataclass(frozen=True)
class LaidHidden:
    """Hidden rows of the tokens in `step.group`."""

    hidden: Hidden
    step: LaidStep

    @property
    def residual(self) -> Tensor:
        """This rank's part of the stream."""
        return self.hidden.residual


class _Context:
    """What the layers of one step share; attention has other tokens than products."""

    def __init__(self, positions: Tensor, cos_sin: Tensor | None, comm: Comm, attention: LayerContext) -> None:
        self.positions = positions
        self.cos_sin = cos_sin
        self.comm = comm
        self._attention = attention

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Attention of the rows that are at home here, if any are."""
        return self._attention.attend(j, q, k, v, rotate=rotate) if len(q) else torch.empty_like(q)


class LaidForward:
    """What `Forward` is on one device, on one rank of layouts: all ranks run every step together.

    Decodes alone take `layouts.decode`, every other step `layouts.prefill`; both keep K and V in one place. `num_rows`
    is a multiple of the homes. Raises ConfigError for layouts that do not.
    """

    def __init__(
        self, rank: LaidRank, weights: LoadedWeights, arena: Arena, num_rows: int, device: torch.device
    ) -> None:
        whole, layouts = rank.model.spec, rank.layouts
        if layouts.moves(whole.num_kv_heads):
            raise ConfigError("K and V would move between prompts and decodes; take layouts that keep them in place.")
        self.arena = arena
        self._rank = rank
        self._rows_at_home = num_rows // layouts.homes
        self._upload = uploader(device)
        self._weights = weights
        self._device = device
        self._prefill = self._side(layouts.prefill, rank.loop)
        alike = layouts.decode == layouts.prefill and rank.loop is None
        self._decode = self._prefill if alike else self._side(layouts.decode)

    def _side(self, layout: Layout, loop: Loop | None = None) -> _Side:
        model, run = self._rank.model, self._rank.collectives
        view = View(model.spec, self._weights, layout, run, self._rank.ahead)
        kind: type = type(model)
        seen: Model = kind(laid_spec(model.spec, layout, run))
        own = LoadedWeights(view.embedding, [], view.head)
        forward = Forward(seen, own, self.arena, self._device, layers=view)
        places = np.array(self._rank.layouts.places(layout), np.int64)
        return _Side(layout, replace(laid(model.spec, layout, run), loop=loop), forward, places)

    def keep_maximum(self, layers: Collection[int]) -> None:
        """See `Forward`."""
        for side in (self._prefill, self._decode):
            side.forward.keep_maximum(layers)

    def use_softmax(self, softmax: Softmax) -> None:
        """See `Forward`."""
        for side in (self._prefill, self._decode):
            side.forward.use_softmax(softmax)

    def batches(self, inputs: StepInputs) -> LaidStep:
        """Which tokens are whose."""
        side = self._decode if len(inputs.feed) == inputs.num_tokens else self._prefill
        mesh, layout, rank = side.layout.mesh, side.layout, self._rank.collectives.rank
        of_span = side.places[inputs.row // self._rows_at_home]
        lengths = (inputs.stop - inputs.start).astype(np.int64)
        place = of_span.repeat(lengths)
        order = None
        if (place[1:] < place[:-1]).any():
            order = np.argsort(place, kind="stable")
            place = place[order]
        counts = np.bincount(place, minlength=mesh.count(layout.batch_axes))
        ends = np.concatenate(([0], counts.cumsum()))
        mine, each = mesh.index(rank, layout.batch_axes), mesh.count(layout.to_batch)
        first = mesh.index(rank, layout.gather) * each
        spans = np.flatnonzero(of_span == mine)
        return LaidStep(
            side=side,
            order=order,
            place=place,
            counts=counts,
            group=slice(int(ends[first]), int(ends[first + each])),
            own=slice(int(ends[mine]), int(ends[mine + 1])),
            works=side.forward.plan_spans(inputs.row[spans], inputs.start[spans], inputs.stop[spans]),
        )

    def run_batches(
        self,
        batches: LaidStep,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        pace: Pace | None = None,
        gate: Gate | None = None,
    ) -> LaidHidden:
        """The hidden state after the last layer; the arrays are in the plan's order."""
        step, side, forward = batches, batches.side, batches.side.forward
        if step.order is not None:
            (order,) = self._upload([step.order])
            tokens, positions, slot_mapping = (x.index_select(0, order) for x in (tokens, positions, slot_mapping))
        attention = forward.context(step.works, positions[step.own], slot_mapping[step.own], table)
        comm = side.laid.of(step.counts.tolist())
        context = _Context(positions[step.group], attention.cos_sin, comm, attention)
        return LaidHidden(forward.passed([(tokens, context)], pace, gate), step)

    def logits(self, h: LaidHidden, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, vocab] of the step's tokens `places`, in their order; None: of all."""
        chosen, comm, back = self._chosen(h, places)
        side = h.step.side
        found = side.forward.model.head(side.forward.weights.head, chosen, comm)
        return found if back is None else found.index_select(0, back)

    def final_hidden(self, h: LaidHidden, places: LongArray | None = None, index: Tensor | None = None) -> Tensor:
        """[n, hidden] after the last norm, likewise."""
        chosen, comm, back = self._chosen(h, places)
        side = h.step.side
        found = whole_rows(side.forward.model.final_hidden(side.forward.weights.head, chosen, comm), comm)
        return found if back is None else found.index_select(0, back)

    def _chosen(self, h: LaidHidden, places: LongArray | None) -> tuple[Hidden, Laid, Tensor | None]:
        """This rank's rows of some tokens, the layout for so many of each home, and how the plan's order comes back."""
        step = h.step
        count = len(step.place)
        at = np.arange(count) if places is None else places
        if step.order is not None:
            when = np.empty(count, np.int64)
            when[step.order] = np.arange(count)
            at = when[at]
        laid = np.sort(at)
        counts = np.bincount(step.place[laid], minlength=len(step.counts))
        mine = laid[(laid >= step.group.start) & (laid < step.group.stop)] - step.group.start
        arrays = [mine]
        if not np.array_equal(at, laid):
            arrays.append(np.searchsorted(laid, at))
        index, *back = self._upload(arrays)
        return select(h.hidden, index), step.side.laid.of(counts.tolist()), back[0] if back else None
