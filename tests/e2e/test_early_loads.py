"""Steps whose layers wait for chunks that are on their way: the tokens are those of an engine that has plenty."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.kv.recovery import Recovery
from cellar.kv.store import KVStore
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.arrivals import Arrival, Arrivals
from tests.conformance.test_models import Case, saved_model
from tests.e2e import test_tiers
from tests.e2e.test_tiers import FAMILIES, talk

HURRY = 0.25
"""Seconds that a load waits for a step that needs it, before it goes on."""

SLEEP_CYCLES = 5_000_000
"""Of a device: 3 ms, about."""

LAYERED = "cellar.runtime.steps.executor.LAYERED_TOKENS"


class Watched:
    """Loads that stop behind their first part until a step has come to them; `waited` counts layers that waited.

    With `on_device` each part but the first takes some ms of the device's time instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_device: bool = False) -> None:
        self.waited = 0
        self.unmeasured = 0
        self._come = threading.Event()
        follow = Arrival.follow
        touching, before, write_part = Arrivals.touching, Arrival.before, ArenaChunks.write_part
        measured = KVStore.measured

        def seen(arrivals: Arrivals, slots: NDArray[np.int32]) -> list[Arrival]:
            found = touching(arrivals, slots)
            if found:
                self._come.set()
            return found

        def counted(arrival: Arrival, layer: int) -> None:
            self.waited += 1
            before(arrival, layer)

        def followed(arrival: Arrival) -> None:
            self.waited += 1
            follow(arrival)

        def slow(chunks: ArenaChunks, part: int, slots: Sequence[int], held: Sequence[Tensor]) -> None:
            if part and on_device:
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            elif part:
                self._come.wait(HURRY)
            else:
                self._come.clear()
            write_part(chunks, part, slots, held)

        def told(store: KVStore, prompts: NDArray[np.int32], seconds: float) -> None:
            self.unmeasured += seconds == 0.0
            measured(store, prompts, seconds)

        monkeypatch.setattr(KVStore, "measured", told)
        monkeypatch.setattr(Arrivals, "touching", seen)
        monkeypatch.setattr(Arrival, "before", counted)
        monkeypatch.setattr(Arrival, "follow", followed)
        monkeypatch.setattr(ArenaChunks, "write_part", slow)
        monkeypatch.setattr(Recovery, "step_seconds", lambda *_: 1e9)
        monkeypatch.setattr("cellar.runtime.steps.local.ArenaChunks", partial(ArenaChunks, part_nbytes=1))


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_tokens_are_those_of_plenty(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(case, tmp_path)
    plenty, _, _ = talk(tmp_path, 400)
    watched = Watched(monkeypatch)
    scarce, tiers, _ = talk(tmp_path, 12, kv_offloading_size=0.01)
    assert tiers[1].failed == 0
    assert tiers[1].loaded > 10
    assert watched.waited > 0, "layers had to wait"
    assert watched.unmeasured > 0, "what such a step takes says nothing of computing"
    assert scarce == plenty


@pytest.mark.gpu
@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("case", FAMILIES[:2], ids=lambda case: case.name)
def test_tokens_on_an_accelerator_are_those_of_plenty(
    case: Case, layered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that wait layer by layer leave their graphs; short ones keep theirs, and wait for all."""
    monkeypatch.setattr(LAYERED, 1 if layered else 10**6)
    saved_model(case, tmp_path)
    on_cpu = test_tiers.small_options
    monkeypatch.setattr(
        test_tiers,
        "small_options",
        lambda *args, **more: on_cpu(*args, **more) | {"device": "cuda", "num_threads": None},
    )
    plenty, _, _ = talk(tmp_path, 400)
    watched = Watched(monkeypatch, on_device=True)
    scarce, tiers, _ = talk(tmp_path, 12, kv_offloading_size=0.01)
    assert tiers[1].failed == 0
    assert tiers[1].loaded > 10
    assert watched.waited > 0
    assert scarce == plenty
