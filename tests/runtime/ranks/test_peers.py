"""Ranks that look whether each reaches the others' memory agree on what they do then."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.ops.peers import PeerBoxes
from cellar.runtime.ranks import comm, peers, place
from cellar.runtime.ranks.lane import HostLane
from tests.runtime.steps.steps import tiny_model

SIZE = 3


def met(path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> list[PeerBoxes | None]:
    """What each rank gets; `fails`: what rank 1 cannot do."""
    from torch._C._distributed_c10d import FileStore

    def shared_memory(nbytes: int) -> SimpleNamespace:
        rank = int(threading.current_thread().name)
        if (fails, rank) == ("share", 1):
            raise DeviceError("out of memory")
        return SimpleNamespace(address=1000 * rank, handle=bytes([rank]) * 64)

    def opened(handle: bytes) -> int:
        if (fails, threading.current_thread().name) == ("open", "1"):
            raise DeviceError("peer access is not supported")
        return 1000 * handle[0] + 1

    monkeypatch.setattr(peers.shared, "SharedMemory", shared_memory)
    monkeypatch.setattr(peers.shared, "opened", opened)
    monkeypatch.setattr(peers, "driver_available", lambda: True)
    monkeypatch.setattr(peers, "compiler_available", lambda: True)
    found: list[PeerBoxes | None] = [None] * SIZE

    def run(rank: int) -> None:
        found[rank] = peers.meet(FileStore(str(path / "store"), SIZE), rank, SIZE, torch.device("cpu"))

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


def test_all_that_reach_each_other_have_every_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, boxes in enumerate(met(tmp_path, "", monkeypatch)):
        assert boxes is not None
        assert (boxes.rank, boxes.sizes.ranks) == (rank, SIZE)
        assert boxes.addresses.tolist() == [1000 * r + (r != rank) for r in range(SIZE)]
        assert boxes.take(torch.empty(boxes.sizes.nbytes, dtype=torch.bfloat16))


@pytest.mark.parametrize("fails", ["share", "open"])
def test_where_one_cannot_nobody_does_and_one_says_why(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert met(tmp_path, fails, monkeypatch) == [None] * SIZE
    why = {"share": "out of memory", "open": "peer access is not supported"}[fails]
    wanted = f"small sums go through NCCL, which is slower: GPU 1 says: {why}."
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_ranks_without_peer_access_sum_through_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole way of a rank on a GPU, but that the library is gloo: asked for peers' memory, each driver says no."""

    def refused(handle: bytes) -> int:
        raise DeviceError("peer access is not supported between these two")

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(comm, "nccl_group", comm.gloo_group)
    monkeypatch.setattr(place, "lane_on", lambda device: HostLane())
    monkeypatch.setattr(peers.shared, "SharedMemory", lambda nbytes: SimpleNamespace(address=1, handle=bytes(64)))
    monkeypatch.setattr(peers.shared, "opened", refused)
    monkeypatch.setattr(peers, "driver_available", lambda: True)
    monkeypatch.setattr(peers, "compiler_available", lambda: True)
    model, _ = tiny_model()

    def run(rank: int) -> torch.Tensor:
        found = place.TensorPlace(rank, 2, str(tmp_path / "meeting")).take(model, torch.device("cuda", rank)).comm
        assert isinstance(found, comm.GroupComm)
        with torch.inference_mode():
            return found.all_reduce(torch.full((3, 5), 2.0**rank))

    with ThreadPoolExecutor(2) as threads:
        for total in threads.map(run, range(2)):
            assert torch.equal(total, torch.full((3, 5), 3.0))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "small sums go through NCCL, which is slower: GPU 0 says: peer access is not supported between these two."
    ]
