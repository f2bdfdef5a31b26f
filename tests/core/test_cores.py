"""How many cores a process may use, which are not all that the machine has."""

from __future__ import annotations

import os
import sys

import pytest

from cellar.core.cores import num_cores


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say")
def test_cores_are_those_that_the_system_lets_it_run_on() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert num_cores() == len(before)
