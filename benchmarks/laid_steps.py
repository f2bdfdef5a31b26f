"""The ranks that `benchmarks/layouts.py` times: each stores a mesh's share once, and runs every layout over it.

A step is the engine's: table, layers, head, sampling, tokens shared, launched by `StepExecutor` kernel by kernel. What
a context holds is made up, so that no prompt is computed for it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from queue import Empty
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.spawn import start_processes

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError
from cellar.core.layouts import Layout, Layouts, Mesh
from cellar.core.messages import Emit, RowOpen, Source, Spans, StepPlan, StepResult, TableUpdate
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models import loader, registry
from cellar.models.loader import LoadedWeights
from cellar.models.loop import Loop
from cellar.models.model import Model
from cellar.models.quantization import is_linear
from cellar.models.views import laid_spec
from cellar.ops.cpu.launch import prepare as prepare_kernels
from cellar.ops.linear.choice import Shape as MatrixShape
from cellar.ops.linear.device import prepare
from cellar.ops.linear.weight import Weight
from cellar.runtime.probes.linear import chooser_of
from cellar.runtime.probes.registry import profiles_of
from cellar.runtime.ranks.comm import RankLink
from cellar.runtime.ranks.lane import lane_on
from cellar.runtime.ranks.place import LaidPlace, LaidRank, Seat
from cellar.runtime.steps.capacity import plan_slots
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.masks import MaskBox

AHEAD = 2
TIMED_SECONDS = 0.5
FEWEST, MOST, ALONE = 3, 20, 5
"""Steps that are timed one behind the other, at least and at most; and of those that the device has to itself."""

CLOCK_HZ = 2e9
"""At least that of the GPU: cycles that it sleeps while a step is launched."""

LONGEST_SLEEP = 0.5

_FILLED_AT_ONCE = 2**28


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: `sequences`, each of which gets `new` tokens and is `context` tokens long then."""

    sequences: int
    new: int
    context: int

    @property
    def tokens(self) -> int:
        """Of the step."""
        return self.sequences * self.new

    @property
    def decodes(self) -> bool:
        """Whether it is a step of decodes alone."""
        return self.new == 1 < self.context


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, for prompts and decodes alike, and the steps that it is timed with. `looped`: see `Layouts`.

    `rows`: it is asked how many tokens of context fit beside the steps of an engine of so many rows; 0: it is not.
    """

    name: str
    layout: Layout
    shapes: tuple[Shape, ...]
    looped: bool = False
    rows: int = 0


@dataclass(frozen=True)
class Job:
    """What all ranks do. `raw`: the model's config.json; `meeting`: a path by which they find each other, new for each
    job; `budget`: seconds after which no other step is begun.
    """

    raw: Mapping[str, Any]
    dtype: str
    device: str
    ranks: int
    cases: tuple[Case, ...]
    meeting: str
    budget: float
    chunk_size: int = 32


@dataclass(frozen=True, slots=True)
class Started:
    """The name of the devices, and seconds until all ranks had met and stored their first share."""

    device: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a step: `wall`, launched by the host two ahead, and `device`, without waiting for launches (None: on
    the CPU). `sent` and `moved`: bytes of collectives of one rank, as the layout and as the algorithm has them.
    """

    case: str
    shape: Shape
    wall: float
    device: float | None
    steps: int
    sent: float
    moved: float


@dataclass(frozen=True, slots=True)
class Fits:
    """Tokens of context that fit all ranks together, and the bytes of a token on each rank that has it."""

    case: str
    tokens: int
    token_nbytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step that was not run, and why."""

    case: str
    shape: Shape
    why: str


News = Started | Timed | Fits | LeftOut


def run_ranks(job: Job, hear: Callable[[News], None], patience: float) -> None:
    """Run a job in processes of its own, which end when one fails or after `patience` seconds.

    Raises CellarError if that is too short, what torch makes of it if a rank fails.
    """
    news: Any = multiprocessing.get_context("spawn").Queue()
    end = time.monotonic() + patience
    started: Any = start_processes(  # type: ignore[no-untyped-call]
        run_rank, args=(job, news), nprocs=job.ranks, join=False, daemon=True, start_method="spawn"
    )
    try:
        over = False
        while not over:
            over = started.join(timeout=0.05)
            for what in _there(news):
                hear(what)
            if time.monotonic() > end:
                raise CellarError(f"the ranks have not ended after {patience:g} s.")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()


def _there(news: Any) -> Iterator[News]:
    """What has come, and comes within a moment."""
    with suppress(Empty):
        while True:
            yield news.get(timeout=0.2)


def run_rank(rank: int, job: Job, news: Any) -> None:
    """In the process of one rank; rank 0 says what all have found."""
    begin = time.perf_counter()
    torch.set_num_threads(1)
    device = torch.device("cpu" if job.device == "cpu" else f"cuda:{rank}")
    if device.type == "cpu":
        prepare_kernels(getattr(torch, job.dtype))
        name = "cpu"
    else:
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    model = registry.open_model(job.raw, job.dtype, job.chunk_size)
    links: list[RankLink] = []  # of meshes that are done: ending one of NCCL's groups may wait for the other ranks
    for mesh, cases in groupby(job.cases, key=lambda case: case.layout.mesh):
        steps = MeshSteps(model, mesh, rank, device, f"{job.meeting}-{mesh.x}-{mesh.y}-{mesh.z}")

        def tell(what: News) -> None:
            if rank == 0:
                news.put(what)

        steps.most(0.0)
        if not links:
            tell(Started(name, time.perf_counter() - begin))
        links.append(steps.link)
        for case in cases:
            fits: Fits | None = None
            if case.rows:
                fits = steps.fits(case)
                tell(fits)
            for shape in case.shapes:
                if fits is not None and fits.tokens < shape.sequences * shape.context:
                    tell(LeftOut(case.name, shape, f"{fits.tokens:,} tokens of context fit"))
                elif steps.most(time.perf_counter() - begin) > job.budget:
                    tell(LeftOut(case.name, shape, f"the {job.budget:g} s are over"))
                else:
                    tell(steps.timed(case, shape))
        del steps
        _emptied(device)
    news.close()
    news.join_thread()
    if device.type != "cpu":
        os._exit(0)  # libraries of collectives may wait for each other at their end


class MeshSteps:
    """One rank's share of a model over a mesh, in the stored form, and steps of layouts over it.

    All ranks call the same, in the same order.
    """

    def __init__(self, model: Model, mesh: Mesh, rank: int, device: torch.device, meeting: str) -> None:
        self._model, self._device = model, device
        anyhow = Layout(mesh)
        seat = LaidPlace(rank, Layouts(anyhow, anyhow), meeting).take(model, device)
        assert seat.laid is not None
        self._collectives = self.link = seat.laid.collectives
        self._spec = seat.stored
        self._stored = loader.assembled(seat.stored, loader.dummy_reader(device))
        # What layouts gather is gathered as it is stored; the others know more of the same memory.
        self._prepared = self._stored if device.type == "cpu" else prepared(seat.stored, self._stored, device)
        self._masks = MaskBox()

    def most(self, value: float) -> float:
        """The largest that any rank says; all have come here then."""
        return float(self._all(value).max())

    def fits(self, case: Case) -> Fits:
        """As an engine finds it: the largest steps are run once, what is free then is for K and V."""
        config = EngineConfig.of(max_num_seqs=case.rows, block_size=self._model.spec.kv.chunk_size)
        config = config.on(self._device.type)
        layouts = Layouts(case.layout, case.layout, case.looped)
        seat = self._seat(layouts)
        slots = plan_slots(
            seat.model,
            self._weights(layouts),
            config.cache,
            config.schedule,
            self._device,
            enforce_eager=True,
            seat=seat,
        )
        kv = seat.model.spec.kv
        least = int(self._all(float(slots)).min())
        _emptied(self._device)
        return Fits(case.name, least * kv.chunk_size * layouts.homes, kv.chunk_nbytes() // kv.chunk_size)

    def timed(self, case: Case, shape: Shape) -> Timed:
        """Warm, then one step behind the other, then each alone, all of it launched before the device begins."""
        layouts = Layouts(case.layout, case.layout, case.looped)
        seat = self._seat(layouts)
        columns = -(-shape.context // seat.model.spec.kv.chunk_size)
        executor = StepExecutor(
            seat.model,
            self._weights(layouts),
            num_slots=shape.sequences // layouts.homes * columns,
            num_rows=shape.sequences,
            device=self._device,
            seat=seat,
        )
        with torch.inference_mode():
            for buffer in executor.arena.buffers:
                flat = buffer.view(-1)
                for first in range(0, len(flat), _FILLED_AT_ONCE):
                    flat[first : first + _FILLED_AT_ONCE].normal_()
            plans = Plans(shape, columns, layouts.homes, self._model.spec.vocab_size)
            self._launched(executor, [plans.next(), plans.next()])
            each = self.most(self._launched(executor, [plans.next(), plans.next()]))
            count = int(min(MOST, max(FEWEST, TIMED_SECONDS / max(each, 1e-6))))
            self.most(0.0)
            before = self._sent()
            wall = self._launched(executor, [plans.next() for _ in range(count)])
            sent, moved = ((now - then) / count for now, then in zip(self._sent(), before, strict=True))
            wall = self.most(wall)
            alone = None if self._device.type == "cpu" else self._alone(executor, plans, wall)
        del executor, seat
        _emptied(self._device)
        return Timed(case.name, shape, wall, alone, count, sent, moved)

    def _alone(self, executor: StepExecutor, plans: Plans, wall: float) -> float:
        """Seconds of the device in one step: the rank that begins last waits for nobody. The median of a few."""
        cycles = int(min(LONGEST_SLEEP, 1.5 * wall + 2e-3) * CLOCK_HZ)
        found = []
        for _ in range(ALONE):
            plan = plans.next()
            self.most(0.0)
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            seconds = executor.launch(plan, self._masks)().seconds
            found.append(float(self._all(seconds).min()))
        return float(np.median(found))

    def _launched(self, executor: StepExecutor, plans: Sequence[StepPlan]) -> float:
        """Seconds of a step, of which two are on their way."""
        begin = time.perf_counter()
        pending: deque[Callable[[], StepResult]] = deque()
        for plan in plans:
            pending.append(executor.launch(plan, self._masks))
            if len(pending) >= AHEAD:
                pending.popleft()()
        for finish in pending:
            finish()
        return (time.perf_counter() - begin) / len(plans)

    def _seat(self, layouts: Layouts) -> Seat:
        """As `LaidPlace` has it, with collectives that are there already."""
        model, run = self._model, self._collectives
        kind: type = type(model)
        seen: Model = kind(laid_spec(model.spec, layouts.decode, run))
        loop = Loop(lane_on(self._device)) if layouts.looped else None
        ahead = lane_on(self._device) if layouts.gathers else None
        return Seat(seen, self._spec, run, laid=LaidRank(model, layouts, run, loop, ahead))

    def _weights(self, layouts: Layouts) -> LoadedWeights:
        return self._stored if layouts.gathers else self._prepared

    def _sent(self) -> tuple[int, int]:
        account = self._collectives.account
        return sum(account.logical.values()), sum(account.moved.values())

    def _all(self, value: float) -> NDArray[np.float64]:
        """What each rank says."""
        mine = torch.tensor([[value]], dtype=torch.float64, device=self._device)
        found: NDArray[np.float64] = self._collectives.all_gather(mine, 0, "xyz", "figures").cpu().numpy()
        return found


class Plans:
    """Plans of equal steps, numbered; the first opens the rows. A row's slots are numbers of its home's arena."""

    def __init__(self, shape: Shape, columns: int, homes: int, vocab_size: int) -> None:
        self._shape, self._columns, self._homes = shape, columns, homes
        new = 0 if shape.decodes else shape.tokens
        self._tokens = np.random.default_rng(shape.tokens).integers(0, vocab_size, new).astype(np.int32)
        self._number = 0

    def next(self) -> StepPlan:
        """Another one."""
        shape, first = self._shape, self._number == 0
        self._number += 1
        rows = np.arange(shape.sequences, dtype=np.int32)
        stop = np.full(shape.sequences, shape.context, np.int32)
        source = Source.DEVICE if shape.decodes else Source.HOST
        sources, emits = (np.full(shape.sequences, which, np.int32) for which in (source, Emit.LAST))
        opened = rows if first else rows[:0]
        columns = np.arange(self._columns, dtype=np.int32)
        at_home = opened % np.int32(shape.sequences // self._homes)
        return StepPlan(
            step=self._number,
            spans=Spans(rows, stop - np.int32(shape.new), stop, sources, emits),
            tokens=self._tokens,
            table=TableUpdate(
                opened.repeat(self._columns),
                np.tile(columns, len(opened)),
                (at_home[:, None] * np.int32(self._columns) + columns).reshape(-1),
            ),
            opens=tuple(RowOpen(int(row), SamplingParams(temperature=0.0)) for row in opened),
        )


def prepared(spec: ModelSpec, weights: LoadedWeights, device: torch.device) -> LoadedWeights:
    """The same matrices with their choice of kernels, as an engine has them on a GPU."""
    choice_of = chooser_of(profiles_of("auto", device))

    def changed(tensors: Sequence[TensorSpec], there: Mapping[str, Weight]) -> dict[str, Weight]:
        specs = {tensor.name: tensor for tensor in tensors}
        found: dict[str, Weight] = {}
        for name, weight in there.items():
            if isinstance(weight, torch.Tensor) and is_linear(specs[name]):
                found[name] = prepare(weight, choice_of(MatrixShape(*weight.shape)))
            else:
                found[name] = weight
        return found

    layers = [changed(layer.tensors, there) for layer, there in zip(spec.layers, weights.layers, strict=True)]
    return LoadedWeights(changed(spec.embedding, weights.embedding), layers, changed(spec.head, weights.head))


def _emptied(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()
