"""Rows: what the device keeps of each running request between steps.

    table     slot of each chunk                 host mirror, and a copy on the device
    last      last sampled token                 on the device only, so that a step can follow one that still runs
    counts    tokens so far, for penalties       on the device, only for rows whose request has penalties
    the rest  sampling parameters, output index  on the host: a plan says which rows sample, so the host knows them

On the CPU the mirror of the table is the table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import CellarError, IntegrityError
from cellar.core.messages import IntArray, RowOpen, StepPlan, TableUpdate
from cellar.core.sampling import SamplingParams
from cellar.ops.sampling import LEAST_TEMPERATURE, Bans, Biases, Penalties, SamplingRows
from cellar.ops.upload import Upload
from cellar.runtime.memory import is_out_of_memory
from cellar.runtime.steps.counts import TokenCounts
from cellar.runtime.steps.inputs import LongArray

logger = logging.getLogger(__name__)

_UNASKED = -1


class Wants(IntEnum):
    """What a row needs when it samples, as bits; a step needs what any of its rows does."""

    DRAW = 1
    CUT = 2
    PENALTIES = 4
    BIASES = 8
    BANS = 16
    LOGPROBS = 32


@dataclass(frozen=True, slots=True)
class _Listed:
    """Tokens of one row with a number each: a bias, or the output index until which it is banned."""

    tokens: LongArray
    values: NDArray[Any]


class Drawing:
    """How some rows sample in one step: arrays to upload, and what to make of them once they are there."""

    def __init__(self, rows: LongArray, wants: int) -> None:
        self.rows = rows
        self.wants = wants
        self.arrays: list[NDArray[Any]] = []
        self.num_logprobs = 0
        self.asking: LongArray | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan's deltas have been applied: `delta` is what `mirror` needs on the device, empty on the CPU; `failed` says
    why rows could not be opened.
    """

    delta: list[NDArray[Any]]
    failed: dict[int, str]


class DeviceRows:
    """All rows of a runtime. Changes are applied in the order of the plans, by the one thread that launches them.

    `mirrored` says that the device has a table of its own; by default an accelerator has.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        vocab_size: int,
        device: torch.device,
        upload: Upload,
        mirrored: bool | None = None,
    ) -> None:
        self.table_host: IntArray = np.full((num_rows, num_columns), -1, np.int32)
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        host = torch.from_numpy(self.table_host)
        self.table = host.to(device, copy=True) if self._mirrored else host
        # One more than there are rows: what pads a captured step reads and writes the spare one.
        self.last = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.spare = num_rows
        self._device = device
        self._upload = upload
        self._vocab_size = vocab_size
        self._counts = TokenCounts(num_rows, vocab_size, device)
        self._wants = np.zeros(num_rows, np.uint8)
        self._floats = np.zeros((3, num_rows), np.float32)  # temperature, top_p, min_p
        self._integers = np.zeros((3, num_rows), np.int64)  # seed, output index, top_k
        self._penalties = np.zeros((3, num_rows), np.float32)  # repetition, frequency, presence
        self._num_output = self._integers[1]
        self._num_logprobs = np.full(num_rows, _UNASKED, np.int64)
        self._num_prompt_logprobs = np.zeros(num_rows, np.int64)
        self._biases: dict[int, _Listed] = {}
        self._bans: dict[int, _Listed] = {}
        self._plain: dict[int, SamplingRows] = {}

    # -- deltas -----------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> Applied:
        """Opens, then table entries. A row that cannot be opened has its table, and no wishes."""
        failed = {}
        for opened in plan.opens:
            try:
                self._open(opened)
            except Exception as error:  # of one request, whatever it is
                logger.error("row %d could not be opened for request %s", opened.row, opened.name, exc_info=error)
                self._clear(opened.row)
                failed[opened.row] = _why(error)
        update = plan.table
        if not len(update.row):
            return Applied([], failed)
        self.table_host[update.row, update.column] = update.slot
        return Applied(self._delta(update) if self._mirrored else [], failed)

    def mirror(self, places: Tensor, slots: Tensor) -> None:
        """Write entries of the device's table. places: int64 [n] into the flat table; slots: int32 [n]."""
        self.table.view(-1).scatter_(0, places, slots)

    def close(self, rows: Sequence[int]) -> None:
        """The rows are free."""
        for row in rows:
            self._clear(row)

    def _delta(self, update: TableUpdate) -> list[NDArray[Any]]:
        places = update.row.astype(np.int64) * self.table_host.shape[1] + update.column
        # Read back, so that an entry written twice has its last value both times: a scatter's order is free.
        return [places, self.table_host[update.row, update.column]]

    def _clear(self, row: int) -> None:
        self.table_host[row] = -1
        if self._wants[row] & Wants.PENALTIES:
            self._counts.release(row)
        self._biases.pop(row, None)
        self._bans.pop(row, None)
        self._wants[row] = 0

    def _open(self, opened: RowOpen) -> None:
        row, params = opened.row, opened.params
        self._clear(row)
        self._floats[:, row] = params.temperature, params.top_p, params.min_p
        seed = (params.seed or 0) if opened.seed is None else opened.seed
        self._integers[:, row] = seed, opened.num_output, max(params.top_k, 0)
        self._num_logprobs[row] = _UNASKED if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._num_prompt_logprobs[row] = min(params.prompt_logprobs or 0, self._vocab_size)
        if params.logit_bias:
            self._biases[row] = self._listed(list(params.logit_bias), list(params.logit_bias.values()), np.float32)
        if opened.num_output < params.min_tokens and any(token < self._vocab_size for token in opened.stop_ids):
            self._bans[row] = self._listed(opened.stop_ids, [params.min_tokens] * len(opened.stop_ids), np.int64)
        self._wants[row] = self._wants_of(row, params)
        if params.penalized:
            self._penalties[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            if opened.prompt is None or opened.output is None:
                self._wants[row] &= ~Wants.PENALTIES & 0xFF
                raise IntegrityError(f"row {row} has penalties, but was opened without its tokens.")
            self._counts.open(row, *self._upload([opened.prompt.astype(np.int64), opened.output.astype(np.int64)]))

    def _wants_of(self, row: int, params: SamplingParams) -> int:
        draws = params.temperature >= LEAST_TEMPERATURE
        wants = Wants.DRAW if draws else 0
        wants |= Wants.CUT if draws and (params.top_k > 0 or params.top_p < 1) else 0
        wants |= Wants.PENALTIES if params.penalized else 0
        wants |= Wants.BIASES if row in self._biases else 0
        wants |= Wants.BANS if row in self._bans else 0
        wants |= Wants.LOGPROBS if params.logprobs is not None else 0
        return wants

    def _lift_bans(self, rows: LongArray) -> int:
        """Forget the bans of rows that have their min_tokens. Returns what the rows want then."""
        for row in rows[(self._wants[rows] & Wants.BANS) > 0].tolist():
            if self._num_output[row] >= self._bans[row].values[0]:
                del self._bans[row]
                self._wants[row] &= ~Wants.BANS & 0xFF
        return int(np.bitwise_or.reduce(self._wants[rows]))

    def _listed(self, tokens: Sequence[int], values: Sequence[float], kind: type) -> _Listed:
        """Tokens beyond the vocabulary cannot be chosen whatever is said about them; they are left out."""
        ids: LongArray = np.array(tokens, np.int64)
        numbers: NDArray[Any] = np.array(values, kind)
        known = ids < self._vocab_size
        return _Listed(ids[known], numbers[known])

    # -- sampling ---------------------------------------------------------------------------------

    def prompt_logprobs_of(self, row: int) -> int:
        """How many of the best tokens the row's request wants for each prompt token."""
        return int(self._num_prompt_logprobs[row])

    def prepare(self, rows: LongArray) -> Drawing:
        """How `rows` [n], each at most once, sample in this step; their output indices move on."""
        wants = int(np.bitwise_or.reduce(self._wants[rows]))
        if wants & Wants.BANS:
            wants = self._lift_bans(rows)
        drawing = Drawing(rows, wants)
        if wants:
            arrays = drawing.arrays
            arrays.append(self._floats.take(rows, axis=1))
            arrays.append(self._integers.take(rows, axis=1))
            if wants & Wants.LOGPROBS:
                asked = self._num_logprobs[rows]
                drawing.asking = np.flatnonzero(asked != _UNASKED)
                drawing.num_logprobs = int(asked.max())
                arrays.append(drawing.asking)
            if wants & Wants.PENALTIES:
                where = np.flatnonzero(self._wants[rows] & Wants.PENALTIES)
                arrays.append(np.stack((where, self._counts.slots(rows[where]))))
                arrays.append(self._penalties.take(rows[where], axis=1))
            if wants & Wants.BIASES:
                arrays += _stacked(rows, self._biases)
            if wants & Wants.BANS:
                arrays += _stacked(rows, self._bans)
        self._num_output[rows] += 1
        return drawing

    def bind(self, drawing: Drawing, tensors: Sequence[Tensor]) -> SamplingRows:
        """The drawing's arrays, once they are on the device, as `sample` wants them."""
        count, wants = len(drawing.rows), drawing.wants
        if not wants:
            return self.plain(count)
        rest = iter(tensors)
        temperature, top_p, min_p = next(rest)
        seed, output_index, top_k = next(rest)
        asking = next(rest) if wants & Wants.LOGPROBS else None
        penalties = biases = bans = None
        if wants & Wants.PENALTIES:
            (where, slots), (repetition, frequency, presence) = next(rest), next(rest)
            counts = self._counts
            penalties = Penalties(where, slots, counts.prompt, counts.output, repetition, frequency, presence)
        if wants & Wants.BIASES:
            biases = Biases(next(rest), next(rest), next(rest))
        if wants & Wants.BANS:
            bans = Bans(next(rest), next(rest), next(rest))
        return SamplingRows(
            seed=seed,
            output_index=output_index,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            greedy=not wants & Wants.DRAW,
            cut=bool(wants & Wants.CUT),
            penalties=penalties,
            biases=biases,
            bans=bans,
            logprob_rows=asking,
            num_logprobs=drawing.num_logprobs,
        )

    def sampled(self, rows: Tensor, tokens: Tensor, how: SamplingRows) -> None:
        """Remember the tokens [n] that `rows` [n] got."""
        self.last.index_copy_(0, rows, tokens)
        if how.penalties is not None:
            self._counts.add(how.penalties.slots, tokens.index_select(0, how.penalties.rows))

    def plain(self, count: int) -> SamplingRows:
        """Rows that all take the best token: nothing is looked at, so one object per count serves for ever."""
        if count not in self._plain:
            zero = torch.zeros(count, dtype=torch.float32, device=self._device)
            none = torch.zeros(count, dtype=torch.int64, device=self._device)
            one = torch.ones(count, dtype=torch.float32, device=self._device)
            self._plain[count] = SamplingRows(
                seed=none,
                output_index=none,
                temperature=zero,
                top_k=none,
                top_p=one,
                min_p=zero,
                greedy=True,
                cut=False,
            )
        return self._plain[count]


def _why(error: Exception) -> str:
    if is_out_of_memory(error):
        return "there was no memory to count this request's tokens for its penalties; leave those out, or try again."
    if isinstance(error, CellarError):
        return str(error)
    return f"the request has failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})."


def _stacked(rows: LongArray, listed: dict[int, _Listed]) -> list[NDArray[Any]]:
    """Place in the batch, token and number of every entry of the rows that have any."""
    places, tokens, values = [], [], []
    for place, row in enumerate(rows.tolist()):
        entry = listed.get(row)
        if entry is not None:
            places.append(np.full(len(entry.tokens), place, np.int64))
            tokens.append(entry.tokens)
            values.append(entry.values)
    return [np.concatenate(places), np.concatenate(tokens), np.concatenate(values)]
