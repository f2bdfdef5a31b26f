"""Every model family in tiny pools over device, host and disk: greedy tokens (float32) are those of plenty, whatever is
loaded, computed again, lost or suspended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.messages import SchedulerStats
from cellar.kv.links import Link
from cellar.kv.recovery import Recovery
from cellar.kv.store import KVStore, Residency
from cellar.runtime.tiers.disk import DiskTier
from tests.conformance.test_models import Case, saved_model
from tests.e2e.test_tiers import CHUNK, FAMILIES, Tokens, opened, small_options, talk


def three(folder: Path, disk: Path, host: int = 12) -> dict[str, object]:
    """Options for so many chunks of host memory, and a disk that holds all."""
    nbytes = int(str(small_options(folder, host)["kv_cache_memory_bytes"]))
    return {"kv_offloading_size": nbytes / 2**30, "kv_disk_path": disk, "kv_disk_size": 0.02}


class Lots(Recovery):
    """Loads or computes each chunk by lot."""

    def loads(
        self, tier: np.ndarray, cost: np.ndarray, links: Sequence[Link], now: float, floor: float = 0.0
    ) -> np.ndarray:
        found: np.ndarray = (tier == 0) | (np.random.default_rng(len(tier) + int(cost[0])).random(len(tier)) < 0.5)
        return found


HOLES = {
    "front": lambda column, count: column == 0,
    "middle": lambda column, count: column == count // 2,
    "everywhere": lambda column, count: column % 2 == 1,
}


@pytest.mark.long
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_tokens_over_three_tiers_are_those_of_plenty(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    saved_model(case, tmp_path / "model")
    plenty = talk(tmp_path / "model", 400)[0]

    def scarce(name: str, recovery: str = "load") -> SchedulerStats:
        answers, stats = talked(tmp_path / "model", 12, recovery, **three(tmp_path / "model", tmp_path / name))
        assert answers == plenty, name
        return stats

    loaded = scarce("load")
    assert loaded.tiers[1].hit_tokens > 0
    assert loaded.tiers[2].hit_tokens > 0
    assert sum(tier.hit_tokens for tier in loaded.tiers) == loaded.prefix_hits
    computed = scarce("compute", "compute")
    assert computed.tiers[1].loaded == computed.tiers[2].loaded == 0
    assert computed.recomputed_tokens > loaded.recomputed_tokens
    with monkeypatch.context() as patch:
        patch.setattr("cellar.engine.opened.Recovery", Lots)
        mixed = scarce("mixed", "faster")
        assert mixed.recomputed_tokens > 0
        assert mixed.tiers[1].loaded + mixed.tiers[2].loaded > 0
    for name, lost in HOLES.items():
        with monkeypatch.context() as patch:
            _lose(patch, lost)
            assert scarce(name).recomputed_tokens > 0


def talked(folder: Path, chunks: int, recovery: str, **options: object) -> tuple[list[Tokens], SchedulerStats]:
    """`talk`, and all figures of the engine."""
    found: list[SchedulerStats] = []
    answers, _, _ = talk(folder, chunks, recovery, then=found.append, **options)  # type: ignore[arg-type]
    return answers, found[0]


def _lose(patch: pytest.MonkeyPatch, lost: object) -> None:
    """Some chunks are never found: they are holes, whichever tier has them."""
    find = KVStore.find

    def holed(store: KVStore, chain: object, tokens: np.ndarray) -> Residency:
        found = find(store, chain, tokens)  # type: ignore[arg-type]
        count = len(found.chunk)
        gone = np.array([lost(column, count) for column in range(count)], np.bool_)  # type: ignore[operator]
        found.chunk[gone], found.tokens[gone], found.tier[gone], found.slot[gone] = -1, 0, -1, -1
        return found

    patch.setattr(KVStore, "find", holed)


@pytest.mark.long
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_suspended_sequences_go_on_over_three_tiers(case: Case, tmp_path: Path) -> None:
    """Long answers at once in memory for two: most are suspended in the middle."""
    (tmp_path / "model").mkdir()
    saved_model(case, tmp_path / "model")
    prompts = [np.random.default_rng(k).integers(3, 101, 5 + k).tolist() for k in range(8)]
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)

    def run(chunks: int, **options: object) -> tuple[Tokens, SchedulerStats]:
        with opened(tmp_path / "model", **small_options(tmp_path / "model", chunks), **options) as llm:
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            return found, llm.stats()

    plenty, calm = run(400)
    scarce, stats = run(14, decode_reserve=0.0, **three(tmp_path / "model", tmp_path / "kv", 60))
    assert calm.preemptions == 0
    assert stats.preemptions > 1
    assert stats.tiers[1].loaded > 0, "they do not begin anew"
    assert scarce == plenty


def test_disk_slower_than_computing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second a chunk, where a prompt takes milliseconds: once that is known, chunks are computed again."""
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    read = DiskTier.read

    def slowly(tier: DiskTier, *arguments: object) -> None:
        time.sleep(0.2)
        read(tier, *arguments)  # type: ignore[arg-type]

    plenty = talk(tmp_path / "model", 400)[0]
    options: dict[str, object] = {"kv_disk_path": tmp_path / "kv", "kv_disk_size": 0.02}
    talked(tmp_path / "model", 40, "load", **options)  # what is there after a restart
    monkeypatch.setattr(DiskTier, "read", slowly)
    answers, stats = talked(tmp_path / "model", 12, "faster", **options)
    assert answers == plenty
    assert stats.recomputed_tokens > 2 * CHUNK
    assert stats.tiers[1].loaded * CHUNK < stats.recomputed_tokens, "few were tried"
