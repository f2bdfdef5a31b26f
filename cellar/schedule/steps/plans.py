"""Plans: one step after another, of a budget of tokens each, from a plan's making to its commit."""

from __future__ import annotations

from collections import deque

from cellar.core.errors import IntegrityError
from cellar.core.messages import StepPlan, StepResult
from cellar.schedule.steps.batch import InFlight, StepBatch
from cellar.schedule.steps.holders import Holders
from cellar.schedule.steps.portions import Portions
from cellar.schedule.steps.prompts import Prompts
from cellar.schedule.steps.stagger import Stagger
from cellar.schedule.steps.tally import Tally
from cellar.schedule.steps.teams import Teams


class Plans:
    """Decodes first, then `prompts`, or with `phases_apart` prompts as long as there are any.

    `budget` is how many tokens a step has at most, `row_depth` how many plans in flight may name one row that decodes,
    `teams` which of these a plan has. `in_flight` are the plans that have not committed, the oldest first. Of `stages`
    plans one after another each is at another stage.
    """

    def __init__(
        self,
        holders: Holders,
        prompts: Prompts,
        tally: Tally,
        budget: int,
        row_depth: int,
        stagger: Stagger | None,
        phases_apart: bool,
        stages: int = 1,
    ) -> None:
        self.in_flight: deque[InFlight] = deque()
        self._holders = holders
        self._prompts = prompts
        self._tally = tally
        self._budget = budget
        self._row_depth = row_depth
        self._stagger = stagger
        self._phases_apart = phases_apart
        self._portions = Portions(holders)
        self._teams = Teams(holders.rows, stages)
        self._stages = stages
        self._made = 0

    def make(self) -> StepPlan | None:
        """The next; None if nothing can be computed before the next commit or add."""
        before = self.in_flight[-self._stages] if len(self.in_flight) >= self._stages else None
        if before is not None and len(before.prompts) and self._prompts.pace.is_long(before.cost):
            return None
        batch = StepBatch(self._holders.rows, self._budget, self._prompts.pace.short)
        if self._phases_apart:
            self._fill_apart(batch)
        elif self._decode(batch):
            self._prompts.plan(batch)
        else:
            self._prompts.plan_short_of_memory(batch)
        if self._stages > 1 and batch.is_empty:
            self._decode(batch, again=True)
        built = batch.build(self._made, tuple(self._holders.closes))
        if built is not None:
            self._holders.closes.clear()
            self.in_flight.append(built[1])
            self._made += 1
            self._teams.planned(built[1].rows)
            if self._stagger is not None:
                self._stagger.passed()
            self._tally.planned(built[1].num_decodes + len(built[0].tokens))
        self._prompts.make_way()
        return None if built is None else built[0]

    def commit(self, result: StepResult) -> InFlight:
        """The oldest in flight, of which this is the result. Raises IntegrityError for another one's."""
        record = self.in_flight.popleft() if self.in_flight else None
        if record is None or record.step != result.step:
            raise IntegrityError(f"the result of step {result.step} came out of turn")
        self._holders.rows.in_flight[record.rows] -= 1
        return record

    def _fill_apart(self, batch: StepBatch) -> None:
        """Prompts as long as there are any, else decodes."""
        self._prompts.plan_running(batch)
        self._prompts.plan_waiting(batch)
        if not batch.has_prompts:
            self._decode(batch)

    def _decode(self, batch: StepBatch, again: bool = False) -> bool:
        """One token of every running decode, or of the team whose turn it is (`again`: see `Teams`), as budget and
        memory allow. False if memory is short.
        """
        holders = self._holders
        rows, store = holders.rows, holders.store
        ready = rows.ready(self._row_depth)
        if len(ready) > 1:
            ready = self._portions.of(ready, self._prompts.pace)
        ready = self._teams.of(ready, again)
        if not len(ready):
            return True
        if len(ready) > batch.budget:
            ready = rows.in_order(ready)[: batch.budget]
        need = ready[rows.planned[ready] >= rows.capacity[ready]]
        enough = True
        if len(need):
            if len(need) > store.num_available:
                ready, need = holders.make_room(ready, need)
                enough = False
            slots = store.extend(len(need), holders.now)
            if slots is None:
                raise IntegrityError(f"{len(need)} chunks were counted as available, but could not be taken")
            batch.place(need, rows.grow(need, slots), slots)
        batch.decode(ready)
        return enough
