"""Stages on GPUs: two on one device as threads, and two devices over NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig, ScheduleConfig
from cellar.core.messages import Request
from cellar.engine.steps import step_engine
from cellar.models.model import Model
from cellar.models.staging import stage, stage_layers
from cellar.runtime.protocol import Runtime
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.opened import open_rank
from cellar.runtime.ranks.place import Seat
from cellar.runtime.ranks.stages import Coming, Stages
from cellar.runtime.steps.local import open_local
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import SECONDS
from tests.runtime.ranks.test_ranks_gpu import PROMPTS, SHAPE, close_enough
from tests.tiny_checkpoint import write_checkpoint

STAGES = 3
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
        ],
    ),
]


class QueueWay:
    """A way among threads whose work is in one stream: what is received has been begun before."""

    def __init__(self, index: int, queues: dict[tuple[int, int], SimpleQueue[Tensor]]) -> None:
        self.index = index
        self.queues = queues

    def send(self, x: Tensor, to: int) -> None:
        self.queues[self.index, to].put(x)

    def receive(self, x: Tensor, source: int) -> Coming:
        return _Coming(self.queues[source, self.index], x)


@dataclass(frozen=True)
class _Coming:
    queue: SimpleQueue[Tensor]
    x: Tensor

    def wait(self) -> None:
        found = self.queue.get(timeout=SECONDS)
        assert found.shape == self.x.shape
        self.x.copy_(found)


@dataclass(frozen=True)
class QueuePlace:
    """A stage in a thread, on the device that all have."""

    rank: int
    ways: tuple[dict[tuple[int, int], SimpleQueue[Tensor]], ...]
    size: int = STAGES

    def take(self, model: Model, device: torch.device) -> Seat:
        kind: type = type(model)
        part: Model = kind(stage(model.spec, self.rank, self.size))
        layers = stage_layers(model.spec.num_layers, self.rank, self.size)
        onward, back = (QueueWay(self.rank, way) for way in self.ways)
        stages = Stages(self.rank, self.size, layers, model.spec.hidden_size, torch.float32, onward, back)
        stages.greet(device)
        return Seat(part, part.spec, None, stages=stages)


@pytest.mark.parametrize("device", DEVICES)
def test_stages_on_one_device_are_the_model(device: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **SHAPE | {"num_hidden_layers": 4})
    config = EngineConfig.of(
        model=str(path), device=device, max_num_seqs=5, max_num_batched_tokens=64, kv_cache_memory_bytes=2**25
    )
    prompts = [[5, 6, 7], list(range(20, 120)), [9] * 30, [3], [20, 21, 22, 23], [20, 21, 22]]

    def answers(runtime: Runtime, stages: int) -> dict[str, list[int]]:
        schedule = ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=64)
        capacity = runtime.capacity
        scheduler = StepScheduler(capacity.num_slots, 5, capacity.chunk_size, 256, schedule, stages=stages)
        engine = step_engine(scheduler, runtime, run_ahead=1 + stages)
        for k, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=20, temperature=0.0)
            engine.add(Request(f"r{k}", torch.tensor(prompt, dtype=torch.int32).numpy(), params, frozenset(), 20))
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.turn(SECONDS):
                for id, token in zip(output.ids, output.tokens, strict=True):
                    tokens.setdefault(id, []).append(token)
        engine.close()
        return tokens

    pairs = [(a, b) for a in range(STAGES) for b in range(STAGES)]
    ways = tuple({pair: SimpleQueue[Tensor]() for pair in pairs} for _ in range(2))
    openers = [partial(open_rank, config, path, None, QueuePlace(rank, ways)) for rank in range(STAGES)]
    found = answers(RankGroup(openers, stages=STAGES), STAGES)
    assert found == answers(open_local(config, path).runtime, 1)
    assert all(len(tokens) == 20 for tokens in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has no two CUDA devices")
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE | {"num_hidden_layers": 4})
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    small = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 8, "max_num_batched_tokens": 256}

    def run(stages: int) -> list[object]:
        with LLM(str(tmp_path), device="cuda", pipeline_parallel_size=stages, **small) as llm:
            return [o.outputs[0] for _ in range(2) for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]

    for a, b in zip(run(1), run(2), strict=True):
        assert close_enough(a, b)
