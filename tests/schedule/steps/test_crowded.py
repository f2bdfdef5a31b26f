"""How long a few tokens take beside a crowd, on a modelled clock."""

from __future__ import annotations

import pytest

from tests.schedule.steps.crowded import CASES, OF_DECODE, OF_PROMPT_TOKEN, SECONDS_OF_STEP, Crowd


@pytest.mark.parametrize(("case", "seconds"), [("stops", 8.0), ("biases-256", 21.0)])
def test_no_step_opens_the_rows_of_a_crowd_at_once(case: str, seconds: float) -> None:
    """Two plans in the queue, one that gives a row up, one of its own, and seven more: eleven steps of 256 rows, and
    for what they open a fifth more. A step that opens 250 rows takes as long as three others.
    """
    waits = Crowd(CASES[case]).run(seconds)
    assert len(waits.wholes) >= 5
    assert max(waits.wholes) < 1.2 * 11 * (SECONDS_OF_STEP + 256 * OF_DECODE)


def test_a_long_prompt_is_waited_for_once() -> None:
    """One step of 2,048 tokens, and what may be beside decodes in the others: 0.1 s at most."""
    waits = Crowd(CASES["long-prompts"]).run(8.0)
    assert len(waits.wholes) >= 5
    assert max(waits.gaps) < SECONDS_OF_STEP + 2048 * OF_PROMPT_TOKEN + 0.1
