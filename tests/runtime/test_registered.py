"""Memory that the driver refuses costs speed, and nothing else."""

from __future__ import annotations

import pytest
import torch

from cellar.runtime.pages import zeros
from cellar.runtime.registered import Registered


@pytest.mark.gpu
def test_what_the_driver_refuses_is_nobody_elses_error() -> None:
    """It keeps the error of a refusal, which the thread's next call would have been told as its own."""
    memory, registered = zeros(2**21), Registered(torch.device("cuda", 0))
    try:
        assert registered.add(memory)
        assert not registered.add(memory), "it is registered already"
        assert not registered.add(memory[:0]), "there is nothing to register"
        there = torch.arange(5, device="cuda")
        assert there.tolist() == [0, 1, 2, 3, 4]
        assert len(registered) == 1
    finally:
        registered.close()
