"""Steps that are cut into micro-batches: what a cut is, and that it changes nothing, on one thread that takes turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.config import ScheduleConfig
from cellar.core.messages import FinishReason, Request, StepPlan
from cellar.core.micro_batches import LANES, LEAST_TOKENS, LEAST_WORK, MOST_RANKS, PART_NBYTES, MicroBatchSizes
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import step_engine
from cellar.models.model import Comm, Hidden
from cellar.ops.norm import add_rms_norm
from cellar.runtime.protocol import Runtime
from cellar.runtime.ranks.micro_batches import sizes_of
from cellar.runtime.ranks.place import Seat
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.forward import Forward, ResidentLayers
from cellar.runtime.steps.inputs import step_inputs
from cellar.runtime.steps.lanes import cut
from cellar.runtime.steps.local import LocalRuntime
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import SECONDS
from tests.runtime.steps.steps import runtime_of, tiny_model
from tests.runtime.steps.test_step_inputs import CHUNK, COLUMNS, ROWS, plan_of, steps

CPU = torch.device("cpu")
MODEL, WEIGHTS = tiny_model()
LEAST = 6
MOST_BATCHES = 4

RandomStep = tuple[list[tuple[int, int, int, int, int]], list[int], list[int]]


def uneven(tokens: int) -> list[int]:
    """Two to four micro-batches of any sizes, of a step of `LEAST` tokens or more: the same for as many tokens."""
    if tokens < LEAST:
        return [tokens]
    count = 2 + tokens % (MOST_BATCHES - 1)
    borders = [0, *sorted(random.Random(tokens).sample(range(1, tokens), count - 1)), tokens]
    return [stop - start for start, stop in pairwise(borders)]


class CutLanes:
    """Implements `Lanes` on one thread, and asserts that who begins anything has the turn.

    `inner`: the other ranks; None: there are none, so a part is the sum. `steps` and `summed` count what was cut.
    `residuals`: the residual of each micro-batch that has had a sum; its layers have only the first rows of it.
    """

    def __init__(self, inner: Comm | None = None, sizes: Callable[[int], list[int]] = uneven) -> None:
        self.sizes = sizes
        self.inner = inner
        self.steps = 0
        self.layers = 0
        self.summed = [0] * MOST_BATCHES
        self.running: int | None = None
        self.residuals: dict[int, Tensor] = {}
        self._handed: dict[int, Tensor] = {}
        self._count = 0
        self._turn = 0
        self._writing = False

    def comm(self, k: int) -> Comm:
        """See `Lanes`."""
        return CutComm(self, k)

    def whole(self, k: int, h: Hidden) -> Hidden:
        """See `Lanes`."""
        if h.part is None:
            return h
        return Hidden(self.residual(k, h.residual) + self.comm(k).all_reduce(h.part.x))

    def residual(self, k: int, handed: Tensor) -> Tensor:
        """All rows of what layers have some rows of, once there was a sum. They must not have touched these."""
        assert handed is self._handed.get(k, handed)
        return self.residuals.get(k, handed)

    def hand(self, k: int, residual: Tensor) -> Tensor:
        """A part of the rows, as a rank has."""
        self.residuals[k], self._handed[k] = residual, residual[: len(residual) // 2]
        return self._handed[k]

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `Lanes`."""
        self.steps += 1
        self._count = self._turn = self.layers = 0
        self.residuals.clear()
        self._handed.clear()
        yield
        assert self.running is None
        assert self._turn == 0, "all have had their turn in the last layer"
        assert self._count > 1, "more than one has had one"

    @contextmanager
    def at(self, k: int) -> Iterator[None]:
        """See `Lanes`."""
        assert self.running is None
        self.running = k
        self._count = max(self._count, k + 1)  # all of them enter before the first layer
        yield
        self.running = None

    def await_turn(self, k: int) -> None:
        """See `Lanes`."""
        assert self.running == k
        assert self._turn == k, "the one before has ended its turn in this layer"
        assert not self._writing
        self._writing = True

    def end_turn(self, k: int) -> None:
        """See `Lanes`."""
        assert self.running == k
        assert self._writing
        self._writing = False
        self._turn = (k + 1) % self._count
        self.layers += self._turn == 0


class CutComm:
    """Implements `Comm` and `NormedSums` for one micro-batch: all sums that a norm follows go with it, and leave some
    rows of the residual.
    """

    loop = None

    def __init__(self, lanes: CutLanes, k: int) -> None:
        self._lanes = lanes
        self._k = k

    @property
    def normed_sums(self) -> CutComm:
        """Itself."""
        return self

    def take(self, like: Tensor, apart: bool = True) -> bool:
        """All."""
        return True

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """By the sum, and the norm behind it."""
        normed, total = add_rms_norm(self._lanes.residual(self._k, residual), self.all_reduce(part), norm, eps)
        return normed, self._lanes.hand(self._k, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """By the other ranks' way."""
        assert self._lanes.running == self._k
        self._lanes.summed[self._k] += 1
        return x if self._lanes.inner is None else self._lanes.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Raises AssertionError."""
        raise AssertionError("layers gather nothing")


# -- the cut ------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(steps(), st.data())
def test_pieces_end_to_end_are_the_step(step: RandomStep, data: st.DataObject) -> None:
    """Any spans, cut anywhere, also into single tokens."""
    inputs = step_inputs(plan_of(*step), np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS), CHUNK)
    total = inputs.num_tokens
    assume(total)
    inner = data.draw(st.sets(st.integers(1, total - 1), max_size=8) if total > 1 else st.just(set()))
    sizes = [stop - start for start, stop in pairwise([0, *sorted(inner), total])]
    pieces = cut(inputs, sizes)
    found = []
    for size, (row, start, stop) in zip(sizes, pieces, strict=True):
        assert row.dtype == start.dtype == stop.dtype == np.int32
        assert (stop > start).all(), "no span is empty"
        assert (stop - start).sum() == size
        found += [(r, p) for r, a, b in zip(row, start, stop, strict=True) for p in range(a, b)]
    spans = zip(inputs.row, inputs.start, inputs.stop, strict=True)
    assert found == [(r, p) for r, a, b in spans for p in range(a, b)]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40_000), st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_of_micro_batches(tokens: int, least: int, most: int) -> None:
    """As few as may be, one for each lane at least, and as equal as may be; none is larger than said, and none smaller
    where there is one for each lane.
    """
    of = MicroBatchSizes(least, most)
    sizes = of.cut(tokens)
    assert sum(sizes) == tokens
    assert len(sizes) == of.count(tokens)
    assert of.never == (most < least)
    if len(sizes) > 1:
        assert len(sizes) == max(LANES, -(-tokens // most))
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - 1 <= sizes[-1] <= sizes[0] <= most
        assert len(sizes) > LANES or sizes[-1] >= least
        assert not of.never
    else:
        assert of.never or tokens < LANES * least, "it could not be cut"


@pytest.mark.parametrize(
    ("least", "tokens", "sizes"),
    [
        (512, 1, [1]),
        (512, 1023, [1023]),
        (512, 1024, [512] * 2),
        (512, 1025, [513, 512]),
        (512, 4096, [2048] * 2),
        (512, 4097, [1366, 1366, 1365]),
        (2048, 4095, [4095]),
        (2048, 4097, [1366, 1366, 1365]),
        (2049, 100_000, [100_000]),
    ],
)
def test_sizes_by_hand(least: int, tokens: int, sizes: list[int]) -> None:
    assert MicroBatchSizes(least, 2048).cut(tokens) == sizes


def test_sizes_of_a_large_model() -> None:
    """Llama-3-70B in 16 bits, 855,654,400 weights in a layer: 819 tokens on two ranks. Never less than `LEAST_TOKENS`,
    however large a layer, and never with more ranks than it was measured with.
    """
    assert MicroBatchSizes.of(855_654_400, 2 * 8192, 2) == MicroBatchSizes(819, 2048)
    assert MicroBatchSizes.of(1e12, 2 * 8192, 2) == MicroBatchSizes(LEAST_TOKENS, 2048)
    assert MicroBatchSizes.of(855_654_400, 2 * 8192, MOST_RANKS + 1).never


def test_sizes_of_a_model() -> None:
    """By the multiplications of a layer on a rank, and what boxes have room for; so small a one is never cut."""
    # q, k, v and out 48 x (48 + 24 + 24 + 48), gate, up and down 3 x 48 x 80, two norms.
    layer = 48 * 144 + 3 * 48 * 80 + 2 * 48
    sizes = sizes_of(MODEL.spec, 2)
    assert sizes.most == PART_NBYTES // (48 * 4)
    assert (sizes.least - 1) * layer / 2 < LEAST_WORK <= sizes.least * layer / 2
    assert sizes.never
    assert sizes_of(MODEL.spec, 2, 7) == MicroBatchSizes(7, sizes.most)


# -- the loop over layers -----------------------------------------------------------------------


def passed(step: RandomStep, lanes: CutLanes | None, gates: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden rows of a step over a cache full of numbers, and what the cache is then."""
    generator = torch.Generator().manual_seed(1)
    arena = Arena(MODEL.spec.kv, ROWS * COLUMNS, CPU)
    for cache in (*arena.k, *arena.v):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    table = np.random.default_rng(0).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(np.int32)
    inputs = step_inputs(plan_of(*step), table, CHUNK)
    tokens = torch.randint(MODEL.spec.vocab_size, (inputs.num_tokens,), generator=generator)
    forward = Forward(MODEL, WEIGHTS, arena, CPU, lanes=lanes)
    batches = forward.batches(inputs)
    sizes = [inputs.num_tokens] if lanes is None else lanes.sizes(inputs.num_tokens)
    assert [batch.stop - batch.start for batch in batches] == sizes
    assert forward.cuts(inputs.num_tokens) == (len(batches) > 1)
    positions, mapping = torch.from_numpy(inputs.positions), torch.from_numpy(inputs.slot_mapping)
    with torch.inference_mode():
        h = forward.run_batches(batches, tokens, positions, mapping, torch.from_numpy(table), gate=gates.append)
    assert h.part is None, "nothing is left to be added up"
    hidden = h.residual if h.delta is None else h.residual + h.delta
    return hidden, torch.stack([*arena.k, *arena.v])


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_step_in_micro_batches_is_the_step(step: RandomStep, data: st.DataObject) -> None:
    """Prompts, decodes and what lies before them, cut anywhere: the same hidden rows, and the same K and V."""
    total = sum(stop - start for _, start, stop, *_ in step[0])
    assume(total >= 2)
    inner = data.draw(st.sets(st.integers(1, total - 1), min_size=1, max_size=MOST_BATCHES - 1))
    sizes = [stop - start for start, stop in pairwise([0, *sorted(inner), total])]
    lanes, gates, gates_of_whole = CutLanes(sizes=lambda _: sizes), [], []  # type: ignore[var-annotated]
    wanted, cache = passed(step, None, gates_of_whole)
    found, cache_then = passed(step, lanes, gates)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache_then, cache, rtol=1e-4, atol=1e-4)
    layers = MODEL.spec.num_layers
    assert (lanes.steps, lanes.layers) == (1, layers)
    assert gates_of_whole == list(range(layers))
    assert gates == [j for j in range(layers) for _ in sizes], "each waits for the layer's K and V"
    # Two sums a layer; what the last layer leaves is added up when all layers are through.
    assert lanes.summed[: len(sizes)] == [2 * layers] * len(sizes)
    assert sorted(lanes.residuals) == list(range(len(sizes))), "layers had some rows of them"


def test_stages_and_streamed_layers_are_not_cut() -> None:
    arena, lanes = Arena(MODEL.spec.kv, 1, CPU), CutLanes()
    assert Forward(MODEL, WEIGHTS, arena, CPU, lanes=lanes).cuts(LEAST)
    assert not Forward(MODEL, WEIGHTS, arena, CPU, lanes=lanes).cuts(LEAST - 1)
    assert not Forward(MODEL, WEIGHTS, arena, CPU).cuts(LEAST)
    assert not Forward(MODEL, WEIGHTS, arena, CPU, lanes=lanes, layers=ResidentLayers(WEIGHTS.layers)).cuts(LEAST)
    assert not Forward(MODEL, WEIGHTS, arena, CPU, lanes=lanes, stages=cast(Any, object())).cuts(LEAST)


# -- whole engines ------------------------------------------------------------------------------

LONGEST = 128


@dataclass(frozen=True)
class Crowd:
    """Requests, and what their scheduler has: with few slots or rows some of them wait, or are suspended."""

    slots: int
    rows: int
    step_tokens: int
    prompts: list[NDArray[np.int32]]
    counts: list[int]
    dropped: frozenset[int]
    temperature: float


@st.composite
def crowds(draw: Any) -> Crowd:
    """Some share a prefix, some are dropped, some have the scheduler compute their prompts in several steps."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    shared = draw(st.integers(0, 48))
    generator = np.random.default_rng(draw(st.integers(0, 9)))
    prefix = generator.integers(3, 100, shared)
    prompts = [
        np.concatenate([prefix[: k % 2 * shared], generator.integers(3, 100, n)]).astype(np.int32)
        for k, n in enumerate(lengths)
    ]
    return Crowd(
        slots=draw(st.integers(8, 16)),
        rows=draw(st.integers(1, 5)),
        step_tokens=draw(st.sampled_from([16, 40, 256])),
        prompts=prompts,
        counts=draw(st.lists(st.integers(1, 40), min_size=len(lengths), max_size=len(lengths))),
        dropped=draw(st.frozensets(st.integers(0, len(lengths) - 1), max_size=2)),
        temperature=draw(st.sampled_from([0.0, 0.7])),
    )


CROWDED = Crowd(
    slots=8,
    rows=5,
    step_tokens=40,
    prompts=[np.arange(3, 31 + k, dtype=np.int32) for k in range(5)],
    counts=[30] * 5,
    dropped=frozenset({3}),
    temperature=0.0,
)
"""More than the slots hold, so that some are suspended."""


def answers(runtime: Runtime[StepPlan], crowd: Crowd) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and how often one was suspended."""
    config = ScheduleConfig(max_num_seqs=crowd.rows, max_num_batched_tokens=crowd.step_tokens, decode_reserve=0.0)
    scheduler = StepScheduler(crowd.slots, crowd.rows, CHUNK, LONGEST, config)
    engine = step_engine(scheduler, runtime)
    for k, (prompt, count) in enumerate(zip(crowd.prompts, crowd.counts, strict=True)):
        params = SamplingParams(max_tokens=count, temperature=crowd.temperature, seed=k)
        engine.add(Request(f"r{k}", prompt, params, frozenset(), count))
    for k in crowd.dropped:
        engine.abort(f"r{k}")
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.turn(SECONDS):
            assert all(reason is not FinishReason.ERROR for reason, _ in output.finished.values())
            for id, token in zip(output.ids, output.tokens, strict=True):
                tokens.setdefault(id, []).append(token)
    scheduler.check_integrity()
    return tokens, scheduler.stats().preemptions


def check_answers(whole: Runtime[StepPlan], cut: Runtime[StepPlan], lanes: CutLanes, crowd: Crowd) -> None:
    """The runtime whose steps are cut in these lanes gives the whole one's tokens."""
    before = lanes.steps
    wanted, _ = answers(whole, crowd)
    found, suspensions = answers(cut, crowd)
    assert found == wanted
    assert crowd is not CROWDED or suspensions > 0
    long = any(len(p) >= LEAST for k, p in enumerate(crowd.prompts) if k not in crowd.dropped)
    assert not long or lanes.steps > before, "long steps were cut"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LocalRuntime, LocalRuntime, CutLanes]]:
    """A runtime, and one whose steps are cut; engines come and go over both."""
    lanes = CutLanes()
    seat = Seat(MODEL, MODEL.spec, None, lanes=lanes)
    whole = runtime_of(MODEL, WEIGHTS)
    in_lanes = LocalRuntime(MODEL, WEIGHTS, num_slots=32, num_rows=8, device=CPU, num_threads=1, seat=seat)
    yield whole, in_lanes, lanes
    whole.close()
    in_lanes.close()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(crowds())
@example(CROWDED)
def test_an_engine_whose_steps_are_cut(both: tuple[LocalRuntime, LocalRuntime, CutLanes], crowd: Crowd) -> None:
    """Any requests, dropped and suspended ones among them: the same tokens."""
    check_answers(*both, crowd)
