"""Results of one plan that have piled up are handed over as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cellar.core.tasks import TaskResult, Values


def merged(results: Iterable[TaskResult]) -> list[TaskResult]:
    """The same results in their order; those of one plan that follow each other, and did not fail whole, are one."""
    runs: list[list[TaskResult]] = []
    for result in results:
        if runs and _follows(runs[-1][-1], result):
            runs[-1].append(result)
        else:
            runs.append([result])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _follows(first: TaskResult, second: TaskResult) -> bool:
    same = (first.worker, first.plan, first.stop) == (second.worker, second.plan, second.first)
    return same and first.error is None and second.error is None


def _joined(run: Sequence[TaskResult]) -> TaskResult:
    errors: dict[int, str] = {}
    for result in run:
        errors.update(result.errors)
    return TaskResult(
        plan=run[0].plan,
        worker=run[0].worker,
        first=run[0].first,
        stop=run[-1].stop,
        flags=np.concatenate([result.flags for result in run]),
        values=tuple([_chain(column) for column in zip(*[result.values for result in run], strict=True)]),
        errors=errors,
        seconds=sum([result.seconds for result in run]),
    )


def _chain(parts: Sequence[Values | None]) -> Values | None:
    there = [values for values in parts if values is not None and len(values)]
    if len(there) > 1:
        return np.concatenate(there)
    return there[0] if there else next((values for values in parts if values is not None), None)
