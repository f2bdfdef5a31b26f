"""Layers of passes of few tokens as graphs, where weights are streamed: launches took longer than they do.

    KV in host memory:  hidden --[graph]--> q, k, v --> attention, launched --> attended --[graph]--> hidden
    on the device:      hidden --[graph, attention in it]--> hidden

A graph has its weights at fixed addresses: there is one for each slot of the ring that a layer was ever in, and for
each way in which its rows were divided between the device and the CPU. What goes in and out lies at fixed places,
too, the same for all layers: so graphs may follow each other in any order, and what one needs while it runs is memory
that all others use as well.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cellar.models.model import Carried, Hidden, LayerContext, Model, Projected, Weights, run_layer
from cellar.runtime.recorder import Recorded, Recorder

_LOG = logging.getLogger(__name__)

MOST_TOKENS = 256
"""Of more tokens a layer computes about as long as it is launched."""

MOST_GRAPHS = 1024
"""Each takes some 0.13 MiB of an H200's memory, beside what `ROOM` is for. Of 32 layers, 32 sizes have graphs, or 16
where each layer is two; what the CPU multiplies cuts them into more.
"""

ROOM = 2**26
"""Bytes that graphs may take of the allocator for what they need while they run: 4 MiB were seen, and 46 where the
library multiplies, which has memory of its own for each stream.
"""

_EXACT = 16
"""Up to so many tokens nothing is filled up: the CPU multiplies every one of them."""

T = TypeVar("T")


class PassLayers(Protocol):
    """What computes layers, or what is before and behind their attention."""

    def layer(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Hidden:
        """All of layer j."""

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """See `Model`."""

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """See `Model`."""


class LaunchedLayers:
    """Implements `PassLayers` kernel by kernel."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.before_attention = model.before_attention
        self.after_attention = model.after_attention

    def layer(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Hidden:
        """See `run_layer`."""
        return run_layer(self._model, j, weights, h, ctx)


def pass_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens that have graphs of their own, ascending, to `most`."""
    sizes = [*range(1, _EXACT + 1), *range(24, 64, 8), *range(64, MOST_TOKENS + 1, 16)]
    most = min(most, MOST_TOKENS)
    return (*(size for size in sizes if size < most), most)


class RecordedLayers:
    """The layers of `model`, for one batch a pass of up to `most` tokens: halves, or whole. Each is launched when it is
    first met, with the padding of its size, which loads what its kernels need, recorded the second time, and replayed
    from then on. `left` says how many bytes the device has left: with too few, or with `MOST_GRAPHS` there, the others
    are launched each time.
    """

    def __init__(self, model: Model, recorder: Recorder, most: int, left: Callable[[], int]) -> None:
        self._model = model
        self._recorder = recorder
        self._left = left
        self._sizes = pass_sizes(most)
        self._rooms: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._pieces: dict[Hashable, tuple[Recorded, Any]] = {}
        # What graphs have read stays where it is, so that its number is that of nothing else.
        self._weights: dict[int, Weights] = {}
        self._launched: set[Hashable] = set()
        self._num_graphs = 0
        self._records = True

    @property
    def most(self) -> int:
        """Tokens of the largest batch that it takes."""
        return self._sizes[-1]

    def takes(self, tokens: int) -> bool:
        """Whether a batch of so many has graphs, or will."""
        return 0 < tokens <= self.most

    def size(self, tokens: int) -> int:
        """To how many a batch that it takes is filled up."""
        return self._sizes[bisect_left(self._sizes, tokens)]

    def of(self, h: Hidden, kind: str = "") -> RecordedPass:
        """A pass begins with this hidden state; it is the only one until it ends. `kind`: of a step whose inputs lie at
        fixed addresses, padded; its layers are recorded whole.
        """
        return RecordedPass(self, self._model, h, self.size(len(h.residual)), kind)

    def room(self, name: str, like: Tensor, size: int) -> Tensor:
        """A fixed place for tensors of this name, whose rows are as those of `like`: [size, ...]."""
        key = name, like.shape[1:], like.dtype
        if key not in self._rooms:
            shape = (self._sizes[-1], *like.shape[1:])
            self._rooms[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._rooms[key][:size]

    def clear(self, name: str, start: int, stop: int) -> None:
        """Padding holds nothing of anybody."""
        if start < stop:
            for (owner, _, _), there in self._rooms.items():
                if owner == name:
                    there[start:stop].zero_()

    def run(self, part: str, size: int, weights: Weights, bare: bool, work: Callable[[], T]) -> T:
        """`work`, launched or replayed; what it returns lies in rooms."""
        key = part, size, id(weights), bare
        if key not in self._pieces and key in self._launched and self._may_record():
            try:
                self._pieces[key] = self._recorder.record(work)
                self._num_graphs += self._pieces[key][0].num_graphs
            except Exception:
                self._records = False
                _LOG.warning("passes of %d tokens have no graphs and are launched each time", size, exc_info=True)
        if key in self._pieces:
            piece, found = self._pieces[key]
            piece.replay()
            return found  # type: ignore[no-any-return]
        self._weights[id(weights)] = weights
        self._launched.add(key)
        return work()

    def _may_record(self) -> bool:
        if self._records and (self._num_graphs >= MOST_GRAPHS or self._left() < ROOM):
            self._records = False
            _LOG.info("graphs of passes have the memory that they may take; other sizes are launched each time")
        return self._records


class RecordedPass:
    """Implements `PassLayers` for the batch of one pass: `hidden` is what the first layer takes, and `left` says what
    the last one has left, until the next pass begins.
    """

    def __init__(self, owner: RecordedLayers, model: Model, h: Hidden, size: int, kind: str) -> None:
        self._owner = owner
        self._model = model
        self._kind = kind
        self._tokens = len(h.residual)
        self._size = size
        self.hidden = self._kept(h)
        for name in ("residual", "delta", "attended"):
            owner.clear(name, self._tokens, size)

    def layer(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Hidden:
        """As one graph, or as two with attention between them."""
        if self._kind:

            def whole() -> Hidden:
                return self._kept(run_layer(self._model, j, weights, h, ctx))

            return self._owner.run(self._kind, self._size, weights, h.delta is None, whole)
        q, k, v, carried = self.before_attention(j, weights, h, ctx)
        attended = ctx.attend(j, q, k, v, rotate=self._model.spec.rope is not None)
        return self.after_attention(j, weights, carried, attended, ctx)

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """Padded but for q, k and v."""
        first = partial(self._first, j, weights, h, ctx)
        q, k, v, carried = self._owner.run("first", self._size, weights, h.delta is None, first)
        n = self._tokens
        return Projected(q[:n], k[:n], v[:n], carried)

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """Padded, as what it carries is."""
        there = self._owner.room("attended", attended, self._size)
        there[: self._tokens].copy_(attended)

        def second() -> Hidden:
            return self._kept(self._model.after_attention(j, weights, carried, there, ctx))

        return self._owner.run("second", self._size, weights, carried.normed is None, second)

    def left(self, h: Hidden) -> Hidden:
        """Without the padding."""
        return h.first(self._tokens)

    def _first(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        q, k, v, carried = self._model.before_attention(j, weights, h, ctx)
        normed = None if carried.normed is None else self._at("normed", carried.normed)
        kept = Carried(self._at("carried", carried.residual), normed)
        return Projected(self._at("q", q), self._at("k", k), self._at("v", v), kept)

    def _kept(self, h: Hidden) -> Hidden:
        assert h.part is None, "one device has the whole model"
        return Hidden(self._at("residual", h.residual), None if h.delta is None else self._at("delta", h.delta))

    def _at(self, name: str, found: Tensor) -> Tensor:
        there = self._owner.room(name, found, self._size)
        there[: len(found)].copy_(found)
        return there
