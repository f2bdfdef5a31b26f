"""Micro-batches on GPUs: sums by copy engines, alone and in whole engines over two devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cellar import LLM, SamplingParams
from cellar.core.micro_batches import LANES, MicroBatchSizes
from cellar.ops.added import added_rms_norm
from cellar.ops.norm import add_rms_norm
from cellar.runtime.ranks import opened
from cellar.runtime.ranks.micro_batches import CopiedSums, MicroBatches
from cellar.runtime.ranks.part_boxes import PartBoxes, PartSizes
from cellar.runtime.ranks.place import TensorPlace
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has no two CUDA devices")
EPS = 1e-5


@two_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_two_lanes(dtype: torch.dtype) -> None:
    """Each sum starts from the last one's, and both lanes go at once; a device of its own for each rank, since streams
    of one that wait for each other may share a queue. All kernels run once before: one that is loaded while its device
    waits for another would have to wait for it, and with it this thread.
    """
    ranks = min(4, torch.cuda.device_count())
    devices = [torch.device("cuda", rank) for rank in range(ranks)]
    for one in devices:  # lets each reach the others
        for other in devices:
            torch.zeros(1, device=one).to(other)
    rows, width, rounds = 64, 512, 12
    sizes = PartSizes(LANES, ranks, rows * width * dtype.itemsize, width * dtype.itemsize)
    memory = [torch.zeros(sizes.total, dtype=torch.uint8, device=device) for device in devices]
    addresses = [box.data_ptr() for box in memory]
    comms: list[list[CopiedSums]] = []
    streams = []
    for rank, device in enumerate(devices):
        boxes = PartBoxes(addresses, rank, sizes, device)
        comms.append([CopiedSums(lane, boxes, device, lambda *_: None) for lane in range(LANES)])
        streams.append([torch.cuda.Stream(device) for _ in range(LANES)])  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randn((LANES, ranks, rows, width), generator=generator).to(dtype)
    weight = torch.rand(width, generator=generator).to(dtype)

    def scaled(total: Tensor, rank: int) -> Tensor:
        return total * (0.25 + rank / 8)

    keys = [(lane, rank) for lane in range(LANES) for rank in range(ranks)]
    mine = {(lane, rank): parts[lane, rank].to(devices[rank]) for lane, rank in keys}
    residual = {key: torch.zeros_like(part) for key, part in mine.items()}
    weights = [weight.to(device) for device in devices]
    for rank, device in enumerate(devices):
        with torch.cuda.device(device):
            part = mine[0, rank].clone()
            others = torch.zeros((ranks - 1, *part.shape), dtype=dtype, device=device)
            loaded, _ = added_rms_norm(part, others, rank, part, weights[rank], EPS)
            part.copy_(scaled(loaded, rank))
        torch.cuda.synchronize(device)
    normed: dict[tuple[int, int], Tensor] = {}
    for _ in range(rounds):
        for lane, rank in keys:
            with torch.cuda.device(devices[rank]), torch.cuda.stream(streams[rank][lane]):
                at = lane, rank
                normed[at], residual[at] = comms[rank][lane].add_rms_norm(mine[at], residual[at], weights[rank], EPS)
                mine[at].copy_(scaled(normed[at], rank))
    for device in devices:
        torch.cuda.synchronize(device)
    for lane in range(LANES):
        here, so_far = list(parts[lane]), torch.zeros_like(parts[lane, 0])
        for _ in range(rounds):
            total = here[0].float()
            for part in here[1:]:
                total = total + part.float()
            wanted, so_far = add_rms_norm(so_far, total.to(dtype), weight, EPS)
            here = [scaled(wanted, rank) for rank in range(ranks)]
        for rank in range(ranks):
            own = sizes.rows(rank, rows)
            assert torch.equal(normed[lane, rank].cpu(), normed[lane, 0].cpu()), "all ranks have the same bits"
            tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
            kept = so_far[own.start : own.stop]
            torch.testing.assert_close(residual[lane, rank].cpu(), kept, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(normed[lane, rank].cpu(), wanted, rtol=tolerance, atol=tolerance)


SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@two_devices
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_long_prompts_give_the_tokens_of_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, alone and in company, with what others have computed before, and twice the same."""
    monkeypatch.setattr(opened, "TensorPlace", partial(TensorPlace, micro_tokens=513))
    shape = SHAPE
    if kind == "opt":
        shape = SHAPE | {"model_type": "opt", "architectures": ["OPTForCausalLM"], "num_key_value_heads": 4}
        shape |= {"ffn_dim": 512, "word_embed_proj_dim": 256}
    write_checkpoint(tmp_path, **shape)
    rng = np.random.default_rng(5)
    prefix = rng.integers(3, 420, 900).tolist()
    prompts = [
        rng.integers(3, 420, 1500).tolist(),
        prefix + rng.integers(3, 420, 700).tolist(),
        prefix + rng.integers(3, 420, 1900).tolist(),
        rng.integers(3, 420, 30).tolist(),
    ]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)

    def run(size: int) -> tuple[list[Any], list[list[int]]]:
        small: dict[str, Any] = {"kv_cache_memory_bytes": 2**27, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
        with LLM(str(tmp_path), device="cuda", dtype="float32", tensor_parallel_size=size, **small) as llm:
            alone = [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0] for prompt in prompts]
            together = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
            again = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
            assert again == together, "runs repeat"
            return alone, together

    (one, _), (two, company) = run(1), run(2)
    for a, b, c in zip(one, two, company, strict=True):
        for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if x != y:
                assert y in a.logprobs[i]
                assert abs(a.logprobs[i][x].logprob - a.logprobs[i][y].logprob) < 2e-3
                break
        else:
            assert list(b.token_ids) == list(c)


def test_steps_are_cut_alike() -> None:
    """Not while a step is recorded, and not short ones."""
    device = torch.device("cuda", 0)
    sizes = PartSizes(LANES, 2, 4096, 64)
    memory = [torch.zeros(sizes.total, dtype=torch.uint8, device=device) for _ in range(2)]
    boxes = PartBoxes([box.data_ptr() for box in memory], 0, sizes, device)
    lanes = MicroBatches(MicroBatchSizes(500, 2048), boxes, device, lambda *_: None)
    assert lanes.sizes(4000) == [2000, 2000]
    assert lanes.sizes(999) == [999]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        assert lanes.sizes(4000) == [4000]
