"""StepExecutor: one plan, from the deltas of its rows to the tokens of its results.

    apply deltas -> upload index arrays -> layers -> head on what is emitted -> sample -> remember -> download

`launch` starts all of it. On the CPU everything is done when it returns; on an accelerator nothing has been waited
for, and the function it returns waits for the event behind the last copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import CellarError, IntegrityError
from cellar.core.messages import Flag, FloatArray, Logprobs, StepPlan, StepResult
from cellar.models.loader import LoadedWeights
from cellar.models.model import Model
from cellar.ops.sampling import Masks, Sampled, SamplingRows, TokenLogprobs, sample, target_logprobs
from cellar.ops.upload import Upload
from cellar.runtime.memory import device_left
from cellar.runtime.offload.cpu_jobs import CpuJobs, StepJobs
from cellar.runtime.offload.host_kv import HostKV
from cellar.runtime.pace import Pace, magnitude
from cellar.runtime.ranks.place import Seat
from cellar.runtime.recorder import Recorder
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.forward import Forward, Gate, Layers, Passes
from cellar.runtime.steps.graphs import Missing, StepGraphs
from cellar.runtime.steps.inputs import LongArray, StepInputs, step_inputs
from cellar.runtime.steps.laid import LaidForward
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.steps.recorded_layers import RecordedLayers
from cellar.runtime.steps.rows import DeviceRows, Drawing
from cellar.runtime.steps.streamed_graphs import StreamedGraphs
from cellar.runtime.tiers.arrivals import Arrival, Arrivals
from cellar.runtime.transfer import to_host, uploader

# Logits of scored prompts, and states of pooled ones, are made in pieces of about this many bytes in float32.
SCORED_NBYTES = 64 * 2**20

LAYERED_TOKENS = 512
"""A step of so many tokens or more that waits for chunks, and has no graph in pieces, waits layer by layer, each
launched for itself. In a shorter one launching takes longer than the layers do, so all of it waits, in the device's
queue.
"""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are sampled together.

    `index` are their places among the step's results; None: all, in order. `masked` are those of them, by their
    places in the group, that have a mask; None: none has.
    """

    drawing: Drawing
    index: LongArray | None
    masked: LongArray | None

    def arrays(self) -> list[NDArray[Any]]:
        """Rows first, places last."""
        return [self.drawing.rows, *self.drawing.arrays, *([] if self.index is None else [self.index])]


class _Arrays:
    """Collects the arrays of a step, so that one copy takes them all to the device."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []

    def add(self, arrays: Sequence[NDArray[Any]]) -> slice:
        """Where these will be among the tensors."""
        begin = len(self.arrays)
        self.arrays += arrays
        return slice(begin, len(self.arrays))


class StepExecutor:
    """Runs plans on one device, one at a time, in order.

    `upload` and `mirrored` (see `rows.py`) are what the device asks for unless given. `memory` gives the KV cache its
    bytes, if not the system; `host_kv`: it lies there, and has as many slots; `layers` and `batch`: see `Forward`.
    `seat`: this rank among others, if there are any: rank 0 samples, of several stages that of the last, and the others
    take its tokens. `arrivals`: loads that a step may have to wait for, layer by layer. `sparse_v` and `jobs`: see
    `Forward`.
    """

    def __init__(
        self,
        model: Model,
        weights: LoadedWeights,
        *,
        num_slots: int,
        num_rows: int,
        device: torch.device,
        upload: Upload | None = None,
        mirrored: bool | None = None,
        memory: Callable[[int], Tensor] | None = None,
        layers: Layers | None = None,
        batch: int | None = None,
        seat: Seat | None = None,
        host_kv: HostKV | None = None,
        arrivals: Arrivals | None = None,
        sparse_v: float | None = None,
        jobs: CpuJobs | None = None,
    ) -> None:
        spec = model.spec
        self._jobs = jobs
        self._device = device
        self._vocab_size = spec.vocab_size
        self._chunk_size = spec.kv.chunk_size
        self._upload = upload or uploader(device)
        self.arena = Arena(spec.kv, num_slots, device, memory) if host_kv is None else host_kv.there
        self._whole: Forward | None = None
        self.forward: Passes
        if seat is not None and seat.laid is not None:
            self.forward = LaidForward(seat.laid, weights, self.arena, num_rows, device)
        else:
            comm = None if seat is None else seat.comm
            stages = None if seat is None else seat.stages
            lanes = None if seat is None else seat.lanes
            self.forward = self._whole = Forward(
                model, weights, self.arena, device, comm, layers, batch, sparse_v, stages, jobs, lanes
            )
        self._arrivals = Arrivals() if arrivals is None else arrivals
        self._comm = None if seat is None else seat.link
        self._stages = None if seat is None else seat.stages
        self._samples = (self._comm is None or self._comm.rank == 0) and (self._stages is None or self._stages.is_last)
        self._begun = 0
        self._awaited_masks = 0.0  # seconds, of the step at hand
        num_columns = -(-spec.max_position // spec.kv.chunk_size)
        self._graphs: StepGraphs | None = None
        self._streamed: StreamedGraphs | None = None
        self._kv_here = host_kv is None
        # Who measures steps launches them from a thread of its own, beside the worker's idle moments.
        self._turn = threading.Lock()
        self.rows = DeviceRows(num_rows, num_columns, spec.vocab_size, device, self._upload, mirrored)
        if host_kv is not None:
            assert self._whole is not None
            self._whole.attend_in_host(host_kv, self.rows.table_host)

    def launch(self, plan: StepPlan, masks: MaskBox, pace: Pace | None = None) -> Callable[[], StepResult]:
        """Start a plan; the function returned waits for its end and makes the result. `pace` sets the threads of a CPU.

        The plan's deltas are applied even if computing fails, so that later plans find the rows they expect.
        """
        with self._turn:
            return self._launched(plan, masks, pace)

    def _launched(self, plan: StepPlan, masks: MaskBox, pace: Pace | None) -> Callable[[], StepResult]:
        clock = _clock(self._device)
        self._begun = self._exchanged
        self._awaited_masks = 0.0
        jobs = None if self._jobs is None else self._jobs.begin()
        try:
            applied = self.rows.apply(plan)
            finish = self._run(plan, applied.delta, masks, clock, pace)
            if jobs is not None:
                finish = _checked(finish, jobs)
            return (lambda: replace(finish(), failed=applied.failed)) if applied.failed else finish
        finally:
            self.rows.close(plan.closes)

    def out_of_step(self, error: Exception) -> bool:
        """Whether a plan that failed here may not have failed on the other ranks, which then wait for this one."""
        alone = self._comm is None and self._stages is None
        return not alone and not (isinstance(error, CellarError) and self._exchanged == self._begun)

    @property
    def _exchanged(self) -> int:
        """What has been begun together with other ranks so far."""
        link, stages = self._comm, self._stages
        return (0 if link is None else link.count) + (0 if stages is None else stages.exchanged)

    def _run(
        self,
        plan: StepPlan,
        delta: list[NDArray[Any]],
        masks: MaskBox,
        clock: Callable[[], Callable[[], float]],
        pace: Pace | None,
    ) -> Callable[[], StepResult]:
        given = plan.tokens
        if len(given) and (given.min() < 0 or given.max() >= self._vocab_size):
            raise IntegrityError(f"step {plan.step} has a token that is not in [0, {self._vocab_size}).")
        inputs = step_inputs(plan, self.rows.table_host, self._chunk_size)
        # On the CPU a step's masks have nearly always come when its logits are there, so its rows are grouped then.
        later = bool(plan.masked_rows) and self._device.type == "cpu" and self._samples
        groups = [] if later else self._groups(plan, inputs)
        awaited = self._awaited(inputs)
        gate: Gate | None = None
        if awaited and self._waits_by_layers(inputs):
            gate = _gate(awaited)
            pace = None  # a layer that waits says nothing about threads
            clock = _not_measured(clock)
        elif awaited:
            for arrival in awaited:
                arrival.follow()
            clock = _clock(self._device)  # from where the device goes on
        if gate is None and self._graphs is not None and self._graphs.serves(inputs) and not plan.masked_rows:
            return self._replay(plan.step, self._graphs, inputs, groups[0], delta, masks, clock)
        cut = self._whole is not None and self._whole.cuts(inputs.num_tokens)
        graphs = None if cut else self._graphs
        begins = graphs is not None or self._streamed is not None
        if delta and (begins or not inputs.num_tokens):  # a graph begins before all else is sent
            self.rows.mirror(*self._upload(delta))
            delta = []
        if not inputs.num_tokens:
            return _Finish(plan.step, [], {}, {}, clock())
        if self._stages is not None and self._stages.is_first:
            for rows, tokens in self._stages.told(inputs.feed_rows):
                (where,) = self._upload([rows])
                self.rows.last.index_copy_(0, where, tokens)
        h = None if graphs is None else graphs.hidden(inputs, gate)
        if self._streamed is not None:
            h = self._streamed.hidden(inputs, gate)

        arrays = _Arrays()
        core = arrays.add([inputs.positions, inputs.slot_mapping] if h is None else [])
        given_tokens = arrays.add([inputs.tokens] if h is None and len(given) else [])
        fed = arrays.add(([inputs.feed] if len(given) else []) + [inputs.feed_rows] if h is None else [])
        chosen = arrays.add([] if inputs.all_sampled else [inputs.sampled])
        scored = arrays.add([inputs.scored, inputs.targets] if len(inputs.scored) else [])
        shown = arrays.add([inputs.hidden] if len(inputs.hidden) else [])
        pooled = arrays.add([inputs.pooled] if len(inputs.pooled) else [])
        changed = arrays.add(delta)
        places = [arrays.add(group.arrays()) for group in groups]
        tensors = self._upload(arrays.arrays) if arrays.arrays else []

        if delta:
            self.rows.mirror(*tensors[changed])
        if h is None:
            positions, slot_mapping = tensors[core]
            tokens = self._tokens(tensors[given_tokens], tensors[fed])
            batches = self.forward.batches(inputs)
            if pace is not None:
                _begin(pace, inputs)
            h = self.forward.run_batches(batches, tokens, positions, slot_mapping, self.rows.table, pace, gate)

        if self._stages is not None and not self._stages.is_last:
            if self._stages.is_first:
                self._stages.expect(inputs.sampled_rows, self._device)
            return _Finish(plan.step, [], {}, {}, clock())
        prompt_scores = self._scores(h, inputs, *tensors[scored]) if len(inputs.scored) else {}
        states = self._hidden(h, inputs, *tensors[shown]) if len(inputs.hidden) else {}
        if len(inputs.pooled):
            states |= self._sums(h, inputs, *tensors[pooled])
        outcomes: list[_Outcome] = []
        if len(inputs.sampled):
            index = None if inputs.all_sampled else tensors[chosen][0]
            logits = self.forward.logits(h, None if index is None else inputs.sampled, index)
            drawn = [tensors[place] for place in places]
            if later:
                groups = self._groups(plan, inputs, masks)
                drawn = [self._upload(group.arrays()) for group in groups]
            outcomes = self._chosen(plan.step, logits, groups, drawn, masks)
            if self._stages is not None:
                (where,) = self._upload([inputs.sampled_rows])
                self._stages.give(self.rows.last.index_select(0, where))
        return _Finish(plan.step, outcomes, prompt_scores, states, self._without_masks(clock()))

    def _without_masks(self, clock: Callable[[], float]) -> Callable[[], float]:
        """What a step takes by itself; an accelerator computes while masks are waited for."""
        waited = self._awaited_masks if self._device.type == "cpu" else 0.0
        return (lambda: max(0.0, clock() - waited)) if waited else clock

    def _awaited(self, inputs: StepInputs) -> list[Arrival]:
        """Loads on their way into slots that the step uses."""
        if not self._arrivals:
            return []
        ends = -(-inputs.stop // self._chunk_size)
        used = [self.rows.table_host[row, :end] for row, end in zip(inputs.row.tolist(), ends.tolist(), strict=True)]
        return self._arrivals.touching(np.concatenate(used)) if used else []

    def _waits_by_layers(self, inputs: StepInputs) -> bool:
        """Whether the layers of a step that has to wait do so for their own parts: in pieces, or one by one."""
        graphs = self._graphs
        return graphs is None or inputs.num_tokens >= LAYERED_TOKENS or graphs.waits_in_pieces(inputs)

    def _replay(
        self,
        step: int,
        graphs: StepGraphs,
        inputs: StepInputs,
        group: _Group,
        delta: list[NDArray[Any]],
        masks: MaskBox,
        clock: Callable[[], Callable[[], float]],
    ) -> Callable[[], StepResult]:
        """A step of decodes alone, from its graph. What a graph does not do is done before and after it."""
        plain = self._samples and not group.drawing.wants
        arrays = [*delta, *([] if plain else group.arrays())]
        tensors = self._upload(arrays) if arrays else []
        if delta:
            self.rows.mirror(*tensors[: len(delta)])
        logits, best = graphs.logits(inputs)
        if plain:
            chosen = best()
            if self._comm is not None:
                self._comm.share(torch.stack((chosen.tokens, chosen.finite.long())))
            outcomes = [_Outcome(group, to_host(chosen.tokens), to_host(chosen.finite), None, np.empty(0, np.int64))]
        else:
            outcomes = self._chosen(step, logits, [group], [tensors[len(delta) :]], masks)
        return _Finish(step, outcomes, {}, {}, clock())

    def capture(self, most_rows: int, most_tokens: int, *, parts: Sequence[int] = (), ran: bool = False) -> None:
        """Capture decode steps of up to `most_rows` rows, and short steps with prompts of up to `most_tokens`, on a
        GPU: the first ones now, the others by `prepare` and as steps meet them. Ranks record the same at the same time,
        all of it now, and no pieces, whose sums would be in each. A stage captures none: it waits for another in
        between. `parts`, `ran`: see `StepGraphs`.
        """
        whole = None if self._stages is not None else self._whole
        if whole is not None and self._device.type == "cuda":
            parts = parts if self._comm is None else ()
            with torch.inference_mode(), torch.cuda.device(self._device):
                together = self._comm is not None
                self._graphs = StepGraphs(
                    whole, self.rows, most_rows, most_tokens, self._device, parts=parts, whole=together, ran=ran
                )

    def record_layers(self, recorder: Recorder, most_rows: int, held: int | None) -> None:
        """Record streamed layers, for passes of up to `most_rows` tokens, as such passes come. `held`: bytes that the
        device may hold in all.
        """
        if self._whole is not None and self._comm is None:
            left = partial(device_left, self._device, held)
            recorded = RecordedLayers(self._whole.model, recorder, most_rows, left)
            self._whole.record_layers(recorded)
            if self._kv_here and self._stages is None:
                with torch.inference_mode(), torch.cuda.device(self._device):
                    self._streamed = StreamedGraphs(self._whole, recorded, self.rows, most_rows, self._device)

    def prepare(self) -> bool:
        """A piece of the capturing that is left, between two launches; -> whether there was one."""
        with self._turn:
            if self._graphs is None:
                return False
            with torch.inference_mode(), torch.cuda.device(self._device):
                return self._graphs.prepare()

    def missing(self) -> Missing:
        """What is left to be captured."""
        return Missing(0, 0, 0) if self._graphs is None else self._graphs.missing()

    def release(self) -> None:
        """Let go of the captured steps."""
        self._graphs = None

    def _groups(self, plan: StepPlan, inputs: StepInputs, masks: MaskBox | None = None) -> list[_Group]:
        """One group if no row has a mask, or all `masks` are there; else unmasked rows before masked ones: they do
        not wait.
        """
        rows = inputs.sampled_rows
        if not len(rows):
            return []
        if not self._samples:
            return [_Group(Drawing(rows, 0), None, None)]
        if not plan.masked_rows:
            return [_Group(self.rows.prepare(rows), None, None)]
        is_masked = np.zeros(self.rows.spare, np.bool_)
        is_masked[list(plan.masked_rows)] = True
        is_masked = is_masked[rows]
        if masks is not None and masks.complete(plan.step, rows[is_masked].tolist()):
            return [_Group(self.rows.prepare(rows), None, np.flatnonzero(is_masked))]
        free, bound = np.flatnonzero(~is_masked), np.flatnonzero(is_masked)
        parts = [(free, None), (bound, np.arange(len(bound)))]
        return [_Group(self.rows.prepare(rows[at]), at, masked) for at, masked in parts if len(at)]

    def _tokens(self, given: Sequence[Tensor], fed: Sequence[Tensor]) -> Tensor:
        """The step's tokens: from the host, and those that were sampled before and never left the device.

        given: the host's tokens int64 [tokens], or nothing if all are fed; fed: where (if some are given), and rows.
        """
        last = self.rows.last.index_select(0, fed[-1])
        return given[0].index_copy(0, fed[0], last) if given else last

    def _chosen(
        self, step: int, logits: Tensor, groups: Sequence[_Group], drawn: Sequence[Sequence[Tensor]], masks: MaskBox
    ) -> list[_Outcome]:
        """Sample one group after another; of several ranks the first one does it, and then tells all others at once."""
        if self._comm is None:
            return [
                self._sample(step, logits, group, there, masks)[0] for group, there in zip(groups, drawn, strict=True)
            ]
        told = torch.zeros((2, len(logits)), dtype=torch.int64, device=self._device)
        if not self._samples:
            tokens, finite = self._comm.share(told)
            self.rows.last.index_copy_(0, drawn[0][0], tokens)
            return [_Outcome(groups[0], to_host(tokens), to_host(finite.bool()), None, np.empty(0, np.int64))]
        outcomes = []
        for group, there in zip(groups, drawn, strict=True):
            outcome, chosen = self._sample(step, logits, group, there, masks)
            where = slice(None) if group.index is None else there[-1]
            told[0, where] = chosen.tokens
            told[1, where] = chosen.finite.long()
            outcomes.append(outcome)
        self._comm.share(told)
        return outcomes

    def _sample(
        self, step: int, logits: Tensor, group: _Group, tensors: Sequence[Tensor], masks: MaskBox
    ) -> tuple[_Outcome, Sampled]:
        drawing, index = group.drawing, group.index
        rows_there, tensors = tensors[0], tensors[1:]
        if index is not None:
            logits, tensors = logits.index_select(0, tensors[-1]), tensors[:-1]
        how = self.rows.bind(drawing, tensors)
        late: LongArray = np.empty(0, np.int64)
        if group.masked is not None and len(group.masked):
            begun = time.perf_counter()
            given = masks.wait(step, drawing.rows[group.masked].tolist())
            self._awaited_masks += time.perf_counter() - begun
            how = replace(how, masks=self._masks(step, group.masked, given))
            late = group.masked[[mask is None for mask in given]]
        chosen = sample(logits, how)
        self.rows.sampled(rows_there, chosen.tokens, how)
        return _Outcome(group, *_downloaded(chosen, how), late if index is None else index[late]), chosen

    def _masks(self, step: int, places: LongArray, masks: Sequence[NDArray[np.int32] | None]) -> Masks:
        """The masks of the rows at `places`; what is chosen without one is void."""
        words = -(-self._vocab_size // 32)
        given = [np.full(words, -1, np.int32) if mask is None else mask[:words] for mask in masks]
        least = min(len(mask) for mask in given)
        if least != words:
            raise IntegrityError(f"the masks of step {step} have {least} words, but {words} are needed.")
        bits: NDArray[np.int32] = np.concatenate(given, dtype=np.int32).reshape(-1, words)
        where, there = self._upload([places, bits])
        return Masks(where, there)

    def _scores(
        self, h: Any, inputs: StepInputs, scored: Tensor, targets: Tensor
    ) -> dict[int, tuple[LongArray, int, list[TokenLogprobs]]]:
        """Log-probabilities of targets, row by row, the logits of a few positions at a time."""
        size = max(1, SCORED_NBYTES // (4 * self._vocab_size))
        found: dict[int, tuple[LongArray, int, list[TokenLogprobs]]] = {}
        for row in dict.fromkeys(inputs.scored_rows.tolist()):
            places = np.flatnonzero(inputs.scored_rows == row)
            best = self.rows.prompt_logprobs_of(row)
            pieces = []
            # A row's spans stand together, so its places are a range.
            for begin in range(int(places[0]), int(places[-1]) + 1, size):
                piece = slice(begin, min(begin + size, int(places[-1]) + 1))
                logits = self.forward.logits(h, inputs.scored[piece], scored[piece])
                if self._samples:
                    pieces.append(_to_host(target_logprobs(logits, targets[piece], best)))
            if self._samples:
                found[row] = (inputs.positions[inputs.scored[places]] + 1, best, pieces)
        return found

    def _hidden(self, h: Any, inputs: StepInputs, hidden: Tensor) -> dict[int, tuple[Tensor, LongArray]]:
        states = to_host(self.forward.final_hidden(h, inputs.hidden, hidden).float())
        rows = inputs.hidden_rows
        return {row: (states, np.flatnonzero(rows == row)) for row in dict.fromkeys(rows.tolist())}

    def _sums(self, h: Any, inputs: StepInputs, pooled: Tensor) -> dict[int, tuple[Tensor, LongArray]]:
        """The sum of each pooled row's final hidden states [1, hidden], of some positions at a time."""
        size = max(1, SCORED_NBYTES // (4 * h.residual.shape[1]))
        found: dict[int, tuple[Tensor, LongArray]] = {}
        for row in dict.fromkeys(inputs.pooled_rows.tolist()):
            # A row's spans stand together, so its places are a range.
            first, last = np.flatnonzero(inputs.pooled_rows == row)[[0, -1]].tolist()
            pieces = [
                self.forward.final_hidden(h, inputs.pooled[piece], pooled[piece]).float().sum(0)
                for piece in (slice(at, min(at + size, last + 1)) for at in range(first, last + 1, size))
            ]
            found[row] = to_host(torch.stack(pieces).sum(0, keepdim=True)), np.zeros(1, np.int64)
        return found


def _checked(finish: Callable[[], StepResult], jobs: StepJobs) -> Callable[[], StepResult]:
    """The step's result, if the CPU has done all that it was to do for it."""

    def checked() -> StepResult:
        result = finish()
        jobs.check()
        return result

    return checked


def _gate(awaited: Sequence[Arrival]) -> Gate:
    """Each layer waits for its own part of all loads."""

    def gate(layer: int) -> None:
        for arrival in awaited:
            arrival.before(layer)

    return gate


def _begin(pace: Pace, inputs: StepInputs) -> None:
    """Decodes read all weights, however many rows there are; a layer of prompts takes as long as it has tokens."""
    if inputs.num_tokens == len(inputs.row):
        pace.begin(("decode", magnitude(inputs.num_tokens)), 1.0, inputs.num_tokens)
    else:
        pace.begin(("prompt", inputs.num_tokens.bit_length()), inputs.num_tokens)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a group sampled, on its way to the host."""

    group: _Group
    tokens: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None
    late: LongArray
    """Places among the step's results of rows whose mask did not come in time."""


class _Finish:
    """Waits for a step and makes its result."""

    def __init__(
        self,
        step: int,
        outcomes: Sequence[_Outcome],
        scores: dict[int, tuple[LongArray, int, list[TokenLogprobs]]],
        hidden: dict[int, tuple[Tensor, LongArray]],
        wait: Callable[[], float],
    ) -> None:
        self._step = step
        self._outcomes = outcomes
        self._scores = scores
        self._hidden = hidden
        self._wait = wait

    def __call__(self) -> StepResult:
        seconds = self._wait()
        tokens, finite, logprobs = _merged(self._outcomes)
        valid = finite.astype(np.int32)
        flags = np.where(finite, np.int32(Flag.OK), np.int32(Flag.NAN))
        for outcome in self._outcomes:
            flags[outcome.late] = Flag.LATE
        return StepResult(
            step=self._step,
            tokens=tokens.reshape(-1, 1),
            num_tokens=valid,
            flags=flags,
            logprobs=logprobs,
            prompt_logprobs={row: _prompt(*found) for row, found in self._scores.items()},
            hidden={row: _states(*found) for row, found in self._hidden.items()},
            seconds=seconds,
        )


def _merged(outcomes: Sequence[_Outcome]) -> tuple[NDArray[np.int32], NDArray[np.bool_], Logprobs | None]:
    """The groups' results in the order of the step's spans."""
    if not outcomes:
        return np.empty(0, np.int32), np.empty(0, np.bool_), None
    if len(outcomes) == 1 and outcomes[0].group.index is None:
        only = outcomes[0]
        asked = _logprobs(only, np.arange(len(only.tokens))) if only.logprobs is not None else None
        return only.tokens.numpy().astype(np.int32), only.finite.numpy(), asked
    count = sum(len(outcome.tokens) for outcome in outcomes)
    tokens, finite = np.zeros(count, np.int32), np.zeros(count, np.bool_)
    parts = []
    for outcome in outcomes:
        index = outcome.group.index
        assert index is not None
        tokens[index] = outcome.tokens.numpy()
        finite[index] = outcome.finite.numpy()
        if outcome.logprobs is not None:
            parts.append(_logprobs(outcome, index))
    return tokens, finite, _in_order(parts)


def _logprobs(outcome: _Outcome, index: LongArray) -> Logprobs:
    """`index` are the places of the group's rows among the results."""
    asking = outcome.group.drawing.asking
    assert outcome.logprobs is not None
    assert asking is not None
    return _plain_logprobs(index[asking], outcome.logprobs)


def _plain_logprobs(index: LongArray, found: TokenLogprobs) -> Logprobs:
    return Logprobs(
        index=index.astype(np.int32),
        logprob=found.logprob.numpy(),
        rank=found.rank.numpy().astype(np.int32) - np.int32(1),
        top_ids=found.top_ids.numpy().astype(np.int32),
        top_logprobs=found.top_logprobs.numpy(),
    )


def _in_order(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Groups' log-probabilities as one, by index; those with fewer best tokens are filled up with -inf."""
    if not parts:
        return None
    width = max(part.top_ids.shape[1] for part in parts)
    order = np.argsort(np.concatenate([part.index for part in parts]))

    def wide(array: NDArray[Any], fill: float) -> NDArray[Any]:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

    return Logprobs(
        index=np.concatenate([part.index for part in parts])[order],
        logprob=np.concatenate([part.logprob for part in parts])[order],
        rank=np.concatenate([part.rank for part in parts])[order],
        top_ids=np.concatenate([wide(part.top_ids, 0) for part in parts])[order],
        top_logprobs=np.concatenate([wide(part.top_logprobs, -np.inf) for part in parts])[order],
    )


def _prompt(index: LongArray, best: int, pieces: Sequence[TokenLogprobs]) -> Logprobs:
    """`index` are the targets' positions in the sequence."""
    return _plain_logprobs(index, TokenLogprobs(*(torch.cat(part) for part in zip(*pieces, strict=True))))


def _states(states: Tensor, places: LongArray) -> FloatArray:
    return states.numpy()[places]


def _downloaded(chosen: Sampled, how: SamplingRows) -> tuple[Tensor, Tensor, TokenLogprobs | None]:
    logprobs = None if chosen.logprobs is None else _to_host(chosen.logprobs)
    return to_host(chosen.tokens), to_host(chosen.finite), logprobs


def _to_host(found: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(*(to_host(tensor) for tensor in found))


def _not_measured(clock: Callable[[], Callable[[], float]]) -> Callable[[], Callable[[], float]]:
    """A clock that waits for the end as well, and says 0: nothing is to be learned from a step that waited."""

    def stop() -> Callable[[], float]:
        wait = clock()

        def nothing() -> float:
            wait()
            return 0.0

        return nothing

    return stop


def _clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Started now; call it at the end of the launch, and what that returns to wait and get the seconds between."""
    if device.type == "cpu":
        begin = time.perf_counter()
        return lambda: lambda: time.perf_counter() - begin
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()

    def stop() -> Callable[[], float]:
        # A blocking event: the thread that awaits it sleeps.
        last = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        last.record()

        def wait() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return wait

    return stop
