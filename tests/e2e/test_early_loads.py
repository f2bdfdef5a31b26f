"""Steps whose layers wait for chunks that are on their way: the tokens are those of an engine that has plenty."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cellar.core.messages import IntArray
from cellar.kv.recovery import Recovery
from cellar.kv.store import KVStore
from cellar.models.model import Hidden
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.forward import Gate
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.layer_graphs import LayerGraphs
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.arrivals import Arrival, Arrivals
from cellar.runtime.tiers.storage import Bytes
from tests.conformance.test_models import Case, saved_model
from tests.e2e import test_tiers
from tests.e2e.test_tiers import FAMILIES, talk

HURRY = 0.25
"""Seconds that a load waits for a step that needs it, before it goes on."""

SLEEP_CYCLES = 5_000_000
"""Of a device: 3 ms, about."""

LAYERED = "cellar.runtime.steps.executor.LAYERED_TOKENS"


class Watched:
    """Loads that stop behind their first part until a step has come to them; `waited` counts layers that waited, and
    `pieces` steps in pieces that did.

    With `on_device` each part but the first takes some ms of the device's time instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_device: bool = False) -> None:
        self.waited = 0
        self.pieces = 0
        self.unmeasured = 0
        self._come = threading.Event()
        follow = Arrival.follow
        touching, before, write_part = Arrivals.touching, Arrival.before, ArenaChunks.write_part
        measured, replay = KVStore.measured, LayerGraphs.replay

        def replayed(graphs: LayerGraphs, gate: Gate | None = None) -> None:
            self.pieces += gate is not None and len(graphs) > 1
            replay(graphs, gate)

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

        def slow(chunks: ArenaChunks, part: int, slots: IntArray, memory: Bytes, places: IntArray) -> None:
            if part and on_device:
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            elif part:
                self._come.wait(HURRY)
            else:
                self._come.clear()
            write_part(chunks, part, slots, memory, places)

        def told(store: KVStore, prompts: NDArray[np.int32], seconds: float) -> None:
            self.unmeasured += seconds == 0.0
            measured(store, prompts, seconds)

        monkeypatch.setattr(LayerGraphs, "replay", replayed)
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


class ByHand:
    """In place of captured steps, where there are no graphs: pieces wait as those do, and are computed by launches."""

    def __init__(self, executor: StepExecutor, parts: Sequence[int]) -> None:
        self._executor = executor
        runs = [[j for j, part in enumerate(parts) if part == one] for one in dict.fromkeys(parts)]
        self._last_of = {run[0]: run[-1] for run in runs}
        self.waited: list[int] = []

    def serves(self, inputs: StepInputs) -> bool:
        return False

    def waits_in_pieces(self, inputs: StepInputs) -> bool:
        return True

    def hidden(self, inputs: StepInputs, gate: Gate | None = None) -> Hidden:
        forward, rows = self._executor.forward, self._executor.rows
        tokens, positions, slots, feed, fed = (
            torch.from_numpy(array)
            for array in (inputs.tokens, inputs.positions, inputs.slot_mapping, inputs.feed, inputs.feed_rows)
        )
        tokens = tokens.index_copy(0, feed, rows.last.index_select(0, fed))

        def before(layer: int) -> None:
            if gate is not None and layer in self._last_of:
                self.waited.append(layer)
                gate(self._last_of[layer])

        found: Hidden = forward.run_batches(forward.batches(inputs), tokens, positions, slots, rows.table, None, before)
        return found


def captured_by_hand(monkeypatch: pytest.MonkeyPatch) -> list[ByHand]:
    """What stands in for captured steps from now on; those of a runtime whose chunks come in parts."""
    made: list[ByHand] = []

    def capture(executor: StepExecutor, *_: Any, parts: Sequence[int] = (), **__: Any) -> None:
        if parts:
            made.append(ByHand(executor, parts))
            executor._graphs = made[-1]  # type: ignore[assignment]

    monkeypatch.setattr(StepExecutor, "capture", capture)
    return made


@pytest.mark.parametrize("case", FAMILIES[:3], ids=lambda case: case.name)
def test_tokens_of_pieces_are_those_of_plenty(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece waits for its own part alone."""
    saved_model(case, tmp_path)
    plenty, _, _ = talk(tmp_path, 400)
    watched, made = Watched(monkeypatch), captured_by_hand(monkeypatch)
    scarce, tiers, _ = talk(tmp_path, 12, kv_offloading_size=0.01)
    (graphs,) = made
    assert tiers[1].failed == 0
    assert tiers[1].loaded > 10
    assert watched.waited >= len(graphs.waited) > 0
    assert watched.unmeasured > 0
    assert scarce == plenty


WAYS = {"pieces": 10**6, "layers": 1, "all": 10**6}
"""How steps wait that need what is on its way, and from how many tokens on without a graph: in pieces, layer by layer,
or for all of it. The last two are those of ranks, whose prompts are captured whole."""


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", FAMILIES[:2], ids=lambda case: case.name)
def test_tokens_on_an_accelerator_are_those_of_plenty(
    case: Case, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LAYERED, WAYS[way])
    if way != "pieces":
        capture = StepExecutor.capture

        def whole(executor: StepExecutor, *sizes: int, parts: Sequence[int] = (), **more: Any) -> None:
            capture(executor, *sizes, **more)

        monkeypatch.setattr(StepExecutor, "capture", whole)
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
    assert (watched.pieces > 0) == (way == "pieces")
    assert scarce == plenty
