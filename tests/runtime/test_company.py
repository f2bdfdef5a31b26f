"""Whether threads beside the steps take a core, and that steps leave it to them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.ops.cpu.launch import use_threads
from cellar.runtime import company as company_module
from cellar.runtime.company import MEMORY_SECONDS, Company
from cellar.runtime.pace import Pace
from cellar.runtime.threads import ThreadChoice


def with_duty(share: float, period: float, seconds: float) -> Company:
    """Threads that compute for a share of each period."""
    found, now = Company(), 0.0
    while now < seconds:
        found.now(1, now)
        found.now(0, now + share * period)
        now += period
    return found


def test_nobody_is_there_at_first() -> None:
    assert not Company().is_busy(0.0)
    assert not Company().is_busy(1e9)


def check_company() -> None:
    found = Company()
    found.now(1, 10.0)
    assert not found.is_busy(10.01), "one mask is no neighbour"
    assert found.is_busy(10.2)
    found.now(3, 10.2)
    found.now(0, 10.3)
    assert found.is_busy(10.301), "they come again at once"
    assert not found.is_busy(10.4)


def test_company_is_who_stays() -> None:
    check_company()


@pytest.mark.parametrize("memory", [1e-6, 1e6])
def test_planted_defects_are_found(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """The moment alone counts, or all that ever was."""
    check_company()
    monkeypatch.setattr(company_module, "MEMORY_SECONDS", memory)
    with pytest.raises(AssertionError):
        check_company()


@given(st.floats(0, 1), st.floats(0.0005, 0.02))
def test_the_share_is_that_of_the_time(share: float, period: float) -> None:
    found = with_duty(share, period, 1.0)
    now = found._state[2] + (1 - share) * period
    assert found.share(now) == pytest.approx(share, abs=period / MEMORY_SECONDS)


def drive(choice: ThreadChoice, seconds: list[float], num: int, now: float, beside: bool) -> tuple[list[int], float]:
    """`num` laps of which one on k + 1 threads takes seconds[k] -> the threads of each, and the time."""
    found = []
    for _ in range(num):
        found.append(choice.begin("decode", 1.0, now, beside=beside))
        now += seconds[found[-1] - 1]
        choice.lap(now)
    return found, now


def test_steps_leave_a_core_to_known_company_and_remember_what_suits_them_alone() -> None:
    choice = ThreadChoice(2)
    _, now = drive(choice, [0.002, 0.001], 1000, 0.0, False)
    there, now = drive(choice, [0.002, 0.02], 1000, now, True)
    assert set(there) == {1}
    alone, _ = drive(choice, [0.002, 0.001], 10, now, False)
    assert alone.count(2) >= 9, "from the first lap on"


def test_of_many_cores_they_leave_one() -> None:
    choice = ThreadChoice(8)
    _, now = drive(choice, [0.01 / k for k in range(1, 9)], 1000, 0.0, False)
    there, _ = drive(choice, [0.01 / k for k in range(1, 8)] + [0.1], 1000, now, True)
    assert there[0] == 7
    assert there.count(7) > 0.9 * len(there)


def test_a_pace_looks_for_company_at_every_lap() -> None:
    found: list[int] = []

    def work() -> None:
        use_threads(2)
        now, company = 0.0, Company()
        pace = Pace(clock=lambda: now, company=company)
        pace.begin("decode", 1.0)
        for lap in range(5):
            found.append(pace.threads)
            company.now(int(lap in (1, 2)), now)
            now += 0.2
            pace.lap()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [2, 2, 1, 1, 2]
