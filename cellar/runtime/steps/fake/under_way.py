"""What was handed to the fake runtime and is not answered yet, and what may not be handed to it meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyBatch, EraseBatch, IntArray, StepPlan, StepResult, Tier, TierOrder
from cellar.runtime.protocol import Capacity


@dataclass
class Pending:
    """A submitted plan that no poll has answered."""

    plan: StepPlan
    uses: Mapping[int, frozenset[int]]
    polls: int
    ready: float
    result: StepResult | None = None
    masks: dict[int, NDArray[np.int32] | None] = field(default_factory=dict)
    writes: frozenset[int] = frozenset()


@dataclass
class Copying:
    """A batch that no poll has answered."""

    batch: TierOrder
    polls: int


class UnderWay:
    """Plans and copies in flight. `tiers`: chunks in each tier; `strict`: refuse what a plan in flight still uses."""

    def __init__(self, capacity: Capacity, tiers: Mapping[Tier, int], strict: bool) -> None:
        self.pending: deque[Pending] = deque()
        self.copying: list[Copying] = []
        self._tiers = tiers
        self._chunk_size = capacity.chunk_size
        self._strict = strict
        self._table = np.full((capacity.num_rows, -(-capacity.max_model_len // capacity.chunk_size)), -1, np.int64)

    def clear(self) -> None:
        """Drop everything."""
        self.pending.clear()
        self.copying.clear()

    def runnable(self, samples: bool) -> Pending | None:
        """The first step that has not run, if it can. samples: masks are waited for here."""
        entry = next((entry for entry in self.pending if entry.result is None), None)
        if entry is None or (len(entry.masks) < len(entry.plan.masked_rows) and samples):
            return None
        if any(0 <= batch.before_step <= entry.plan.step for batch in self._copies()):
            return None
        return entry

    def take(self, plan: StepPlan) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
        """Slots that each row of a plan uses, and those that it writes. Raises IntegrityError for a conflict."""
        spans, table = plan.spans, self._table
        for opened in plan.opens:
            table[opened.row] = -1
            if self._strict and any(opened.row in p.uses for p in self.pending):
                raise IntegrityError(f"step {plan.step} opens row {opened.row}, which a plan in flight names")
        table[plan.table.row, plan.table.column] = plan.table.slot
        size = self._chunk_size
        uses: dict[int, frozenset[int]] = {}
        writes: dict[int, set[int]] = {}
        for row, start, stop in zip(spans.row.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True):
            uses[row] = frozenset(table[row, : -(-stop // size)].tolist())
            writes.setdefault(row, set()).update(table[row, start // size : -(-stop // size)].tolist())
        for closed in plan.closes:
            table[closed] = -1
        if self._strict:
            self._check_step(plan, uses, writes)
            for row, written in writes.items():
                for step, others in [(p.plan.step, p.uses) for p in self.pending] + [(plan.step, uses)]:
                    for other, used in others.items():
                        if other != row and written & used:
                            raise IntegrityError(
                                f"step {plan.step} writes slots {sorted(written & used)} for row {row}, "
                                f"which row {other} uses in step {step}"
                            )
        return uses, frozenset().union(*writes.values())

    def check_copy(self, batch: TierOrder) -> None:
        """Nothing under way may write what the batch reads, or use what it writes."""
        name, ends = f"batch {batch.number}", {}
        origin, goal = _ends(batch)
        for what, (tier, slots) in (("reads", origin), ("writes", goal)):
            if tier not in self._tiers:
                raise IntegrityError(f"{name} {what} tier {tier.name}, which is not there")
            if len(slots) and not 0 <= slots.min() <= slots.max() < self._tiers[tier]:
                raise IntegrityError(f"{name} {what} slots that tier {tier.name} does not have")
            ends[what] = {(tier, slot) for slot in slots.tolist()}
        if len(origin[1]) != len(goal[1]) or len(ends["writes"]) != len(goal[1]):
            raise IntegrityError(f"{name} does not give every source a target of its own")
        for other in (copying.batch for copying in self.copying):
            read, written = ({(tier, slot) for slot in slots.tolist()} for tier, slots in _ends(other))
            if ends["writes"] & (read | written) or ends["reads"] & written or other.number == batch.number:
                raise IntegrityError(f"{name} and batch {other.number} are under way and touch the same slots")
        if self._strict and isinstance(batch, CopyBatch):
            targets = {slot for tier, slot in ends["writes"] if tier is Tier.DEVICE}
            sources = {slot for tier, slot in ends["reads"] if tier is Tier.DEVICE and batch.target is not tier}
            for pending in self.pending:
                if pending.writes & sources and batch.after_step < pending.plan.step:
                    raise IntegrityError(f"{name} reads slots that step {pending.plan.step} writes")
                if any(used & targets for used in pending.uses.values()):
                    raise IntegrityError(f"{name} writes slots that step {pending.plan.step} uses")

    def _copies(self) -> list[CopyBatch]:
        return [copying.batch for copying in self.copying if isinstance(copying.batch, CopyBatch)]

    def waits_for_a_step(self, batch: TierOrder) -> bool:
        """True if a step comes before the batch and has not run."""
        return isinstance(batch, CopyBatch) and any(
            p.result is None and p.plan.step <= batch.after_step for p in self.pending
        )

    def _check_step(self, plan: StepPlan, uses: Mapping[int, frozenset[int]], writes: Mapping[int, set[int]]) -> None:
        """A step may use what a batch writes only if the batch comes before it, and write nothing that one reads."""
        for batch in self._copies():
            early = not 0 <= batch.before_step <= plan.step
            for row, used in uses.items():
                if batch.target is Tier.DEVICE and early and used & set(batch.target_slots.tolist()):
                    raise IntegrityError(f"row {row} of step {plan.step} uses slots that batch {batch.number} fills")
                # Within the device a tail is copied that its owner may be writing on in.
                outwards = batch.source is Tier.DEVICE and batch.target is not Tier.DEVICE
                if outwards and writes.get(row, set()) & set(batch.source_slots.tolist()):
                    raise IntegrityError(f"row {row} of step {plan.step} writes what batch {batch.number} copies")


def _ends(batch: TierOrder) -> tuple[tuple[Tier, IntArray], tuple[Tier, IntArray]]:
    """What a batch reads and what it writes; what it erases is both."""
    if isinstance(batch, EraseBatch):
        return (batch.tier, batch.slots), (batch.tier, batch.slots)
    return (batch.source, batch.source_slots), (batch.target, batch.target_slots)
