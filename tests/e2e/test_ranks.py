"""Ranks as real processes with real gloo: tokens, faults, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cellar import LLM, SamplingParams
from cellar.cli.main import build
from cellar.core.errors import CapacityError, ConfigError, DeviceError
from cellar.runtime.ranks import pace
from cellar.runtime.ranks.comm import GroupComm
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.opened import open_rank
from tests.limits import ROOT, SECONDS, until
from tests.server.fake_process import children_of
from tests.server.load import served
from tests.tiny_checkpoint import write_checkpoint

SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 80}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def opened(path: Path, size: int, how: str = "tensor", **options: Any) -> LLM:
    small = {"kv_cache_memory_bytes": 2**20, "block_size": 16, "max_num_seqs": 4, "num_threads": 1}
    return LLM(str(path), device="cpu", **{f"{how}_parallel_size": size}, **small | options)


def ranks_of(llm: LLM) -> list[int]:
    group = llm._front.engine.runtime  # type: ignore[attr-defined]
    assert isinstance(group, RankGroup)
    return [rank.process.pid for rank in group._ranks]  # type: ignore[attr-defined]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


@pytest.mark.long
@pytest.mark.parametrize("how", ["tensor", "pipeline"])
def test_two_processes_give_the_tokens_of_one_and_end_when_one_is_killed(how: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE)
    prompts = [[5, 6, 7], list(range(20, 60)), [9] * 30, [3], [20, 21, 22, 23]]

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    with opened(tmp_path, 1) as llm:
        wanted = tokens(llm)
    with opened(tmp_path, 2, how) as llm:
        assert tokens(llm) == wanted
        pids = ranks_of(llm)
        stream = llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"rank 1 has ended \(its process has ended by signal 9\); start again"):
            list(stream)
        assert not alive(pids), "when the failure is said all ranks are gone"


def open_slow_second(config: Any, directory: Any, placement: Any, place: Any) -> Any:
    """In a rank's process: rank 1 takes 10 ms more for whatever is between two collectives."""
    exchange = GroupComm._exchange

    def slowly(self: GroupComm, begin: Any) -> None:
        time.sleep(0.01)
        exchange(self, begin)

    if place.rank == 1:
        GroupComm._exchange = slowly  # type: ignore[method-assign]
    return open_rank(config, directory, placement, place)


@pytest.mark.long
def test_a_slow_rank_keeps_its_tokens_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace, "SPAN_SECONDS", 2.0)
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_rank", open_slow_second)
    write_checkpoint(tmp_path, **SHAPE)
    prompts = [[5, 6, 7], list(range(20, 60)), [9] * 30]

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]

    with opened(tmp_path, 1) as llm:
        wanted = tokens(llm)
    with opened(tmp_path, 2) as llm:
        end = time.monotonic() + SECONDS
        while not said() and time.monotonic() < end:
            assert tokens(llm) == wanted
    assert said()
    assert said()[0].startswith("rank 1 is slow: the others waited for it for ")


@pytest.mark.long
def test_a_rank_that_is_stopped_again_and_again_keeps_its_tokens(tmp_path: Path) -> None:
    """For four fifths of the time, as a starved one would be: nothing hangs, and no rank is given up."""
    write_checkpoint(tmp_path, **SHAPE)
    with opened(tmp_path, 1) as llm:
        wanted = list(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    with opened(tmp_path, 2) as llm:
        pid, ended = ranks_of(llm)[1], threading.Event()

        def starve() -> None:
            while not ended.wait(0.02):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.08)
                os.kill(pid, signal.SIGCONT)

        with ThreadPoolExecutor(1) as other:
            starved = other.submit(starve)
            try:
                found = llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
            finally:
                ended.set()
                starved.result(SECONDS)
        assert [list(output.outputs[0].token_ids) for output in found] == [wanted] * 3


@pytest.mark.long
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed, or at its ordinary end without `close`; a script needs no guard for its main part."""
    write_checkpoint(tmp_path, **SHAPE)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.e2e.test_ranks import opened, ranks_of\n"
        f"llm = opened(Path({str(tmp_path)!r}), 2)\nprint(*ranks_of(llm), flush=True)\nsys.stdin.readline()\n"
    )
    for kill in (True, False):
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert alive(pids) == pids
        if kill:
            process.kill()
        process.stdin.close()
        process.wait(SECONDS)
        until(lambda pids=pids: not alive(pids))


@pytest.mark.long
def test_what_cannot_be_opened_is_said_in_a_sentence(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 5, .* has 4 KV heads.*; set it to at most 4\."):
        opened(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 3, .* has 2 layers; set it to at most 2\."):
        opened(tmp_path, 3, "pipeline")
    for how in ("tensor", "pipeline"):
        said = f"kv_disk_path does not work on several ranks yet, but {how}_parallel_size is 2"
        with pytest.raises(ConfigError, match=said):
            opened(tmp_path, 2, how, kv_disk_path=str(tmp_path), kv_disk_size=1.0)
        with pytest.raises(CapacityError, match=r"take .* GiB, but device_memory is 0\.001 GiB; raise it, or lower"):
            opened(tmp_path, 2, how, device_memory=0.001)
    with pytest.raises(CapacityError, match=r"one request of max_model_len 256 needs .*raise kv_cache_memory_bytes\."):
        opened(tmp_path, 2, kv_cache_memory_bytes=1000)


@pytest.mark.long
def test_a_server_serves_again_after_a_rank_was_killed() -> None:
    """That the death of a rank is the engine's, of either kind, is shown above; the server knows engines alone."""
    options = ("--tensor-parallel-size", "2", "--device", "cpu", "--num-threads", "1")
    with (
        served(*options) as (process, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as http,
    ):
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}

        def asked() -> str:
            answer = http.post("/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else ""

        first = asked()
        assert first
        (engine,) = [int(path.name) for path in children_of(process.pid)]
        ranks = [int(path.name) for path in children_of(engine)]
        assert len(ranks) == 2
        with ThreadPoolExecutor(1) as thread:
            # Its own connection: it runs while the rank dies, and ends in one way or another.
            url = f"http://127.0.0.1:{port}/v1/completions"
            under_way = thread.submit(httpx.post, url, json=body | {"max_tokens": 200}, timeout=SECONDS)
            os.kill(ranks[1], signal.SIGKILL)
            until(lambda: not alive([engine, *ranks]))
            under_way.exception(SECONDS)
        until(lambda: http.get("/health").status_code == 200)
        until(lambda: asked() == first)


@pytest.mark.parametrize("how", ["tensor", "pipeline"])
def test_cells_are_not_shared(how: str) -> None:
    result = CliRunner().invoke(build(), ["serve", "--cells", "cells.py", f"--{how}-parallel-size", "2"])
    assert result.exit_code == 2
    assert f"{how}_parallel_size shares language models only" in " ".join(result.output.split())
