"""Random graphs, arrivals, aborts, failures and workers: whatever happens, `cell_driver.drive` checks every promise."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.schedule.cells.driver import Case, drive

cases = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 3),
    num_models=st.integers(1, 2),
    num_requests=st.sampled_from([3, 10]),
    abort=st.sampled_from([0.0, 0.0, 0.3]),
    bad=st.sampled_from([0.0, 0.0, 0.2]),
    tight=st.booleans(),
    run_ahead=st.integers(1, 2),
    max_tasks=st.integers(1, 5),
    graph_batch=st.sampled_from([0, 0, 0, 3]),
    graph_ahead=st.booleans(),
    at_once=st.sampled_from([1, 2, 5]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_every_promise_is_kept(case: Case) -> None:
    drive(case)


@pytest.mark.long
@pytest.mark.parametrize("block", range(4))
def test_every_promise_is_kept_for_long(block: int) -> None:
    for k in range(60):
        rng = random.Random(10_000 * block + k)
        drive(
            Case(
                seed=rng.randrange(2**32),
                num_workers=rng.randint(1, 4),
                num_models=rng.randint(1, 3),
                num_requests=rng.choice([3, 12, 30]),
                abort=rng.choice([0, 0, 0.3]),
                bad=rng.choice([0, 0, 0.2]),
                tight=rng.random() < 0.4,
                run_ahead=rng.randint(1, 3),
                max_tasks=rng.randint(1, 5),
                graph_batch=rng.choice([0, 0, 0, 4]),
                graph_ahead=rng.random() < 0.5,
                at_once=rng.choice([1, 2, 5]),
            )
        )


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_company_changes_nothing(seed: int) -> None:
    """The same requests alone, in company, on several workers and under graph batching answer the same.

    `drive` compares with values that were computed without any scheduler, so it is enough that each ends.
    """
    for workers, batch in ((1, 0), (3, 0), (1, 4)):
        seen = drive(Case(seed=seed, num_workers=workers, graph_batch=batch, num_requests=6))
        assert len(seen.finished) == 6
