"""How long a few tokens take beside a crowd, on a modelled clock."""

from __future__ import annotations

import pytest

from tests.schedule.steps import crowded
from tests.schedule.steps.crowded import CASES, OF_DECODE, OF_PROMPT_TOKEN, SECONDS_OF_STEP, Crowd
from tests.server.load import quantile


@pytest.mark.parametrize(("case", "seconds"), [("stops", 8.0), ("biases-256", 8.0)])
def test_a_crowds_rows_take_turns(case: str, seconds: float) -> None:
    """Eleven steps, of which two were in the queue when the client came, and the others have a third of the rows:
    mostly less than six of 256 rows, and never more than eleven and what they open. A step that opens 250 rows takes as
    long as three others.
    """
    waits = Crowd(CASES[case]).run(seconds)
    step = SECONDS_OF_STEP + 256 * OF_DECODE
    assert len(waits.wholes) >= 5
    assert quantile(waits.wholes, 0.5) < 6 * step
    assert max(waits.wholes) < 1.2 * 11 * step


def test_a_crowds_rows_take_turns_while_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is decoding when they come, at whatever moment of its answer: most of its tokens come in steps of a part
    of the rows, though none of the larger ones has been seen. Without turns the first answer takes 0.20 s in the mean.
    """
    firsts = []
    for late in (0.004, 0.008, 0.012):
        monkeypatch.setattr(crowded, "BEGIN", 1.0 + late)
        firsts.append(Crowd(CASES["rows"]).run(2.0).wholes[0])
    assert sum(firsts) / len(firsts) < 0.17


def test_a_long_prompt_is_waited_for_once() -> None:
    """One step of 2,048 tokens, and what may be beside decodes in the others: 0.1 s at most."""
    waits = Crowd(CASES["long-prompts"]).run(8.0)
    assert len(waits.wholes) >= 5
    assert max(waits.gaps) < SECONDS_OF_STEP + 2048 * OF_PROMPT_TOKEN + 0.1
