"""Two GPUs as two ranks: the tokens of one, from captured steps and from eager ones, and nothing left after a fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar import LLM, CompletionOutput, SamplingParams
from cellar.core.errors import ConfigError, DeviceError
from cellar.core.sampling import StructuredOutputsParams
from cellar.runtime.ranks.group import RankGroup
from tests.limits import until
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: this machine has no two CUDA devices"),
]

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = ["a", "one two three", "the same again and again " * 4]


def opened(path: Path, size: int, **options: Any) -> LLM:
    small = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return LLM(str(path), device="cuda", tensor_parallel_size=size, **small | options)


def close_enough(a: CompletionOutput, b: CompletionOutput) -> bool:
    """Equal tokens up to one where two are as likely as rounding can tell."""
    assert a.logprobs is not None
    for i, (one, other) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
        if one != other:
            return other in a.logprobs[i] and abs(a.logprobs[i][one].logprob - a.logprobs[i][other].logprob) < 2e-3
    return True


@pytest.mark.parametrize("eager", [True, False])
def test_two_gpus_give_the_tokens_of_one(eager: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    masked = SamplingParams(max_tokens=20, seed=3, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"))

    def run(size: int) -> tuple[list[CompletionOutput], list[Any], list[str]]:
        with opened(tmp_path, size, enforce_eager=eager) as llm:
            first = [o.outputs[0] for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]
            second = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain, use_tqdm=False)]
            again = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain, use_tqdm=False)]
            assert again == second, "runs repeat"
            texts = [o.outputs[0].text for o in llm.generate(PROMPTS, masked, use_tqdm=False)]
            return first, second, texts

    (alone, _, _), (both, plain_tokens, texts) = run(1), run(2)
    for a, b in zip(alone, both, strict=True):
        assert close_enough(a, b)
    assert plain_tokens == [list(output.token_ids) for output in both]
    assert all(len(text) == 4 and set(text) <= set("ab") for text in texts)


def test_a_rank_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE)
    with opened(tmp_path, 2) as llm:
        group = llm._front.engine.runtime  # type: ignore[attr-defined]
        assert isinstance(group, RankGroup)
        pids = [rank.process.pid for rank in group._ranks]  # type: ignore[attr-defined]
        stream = llm.stream("a", SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        next(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DeviceError, match="rank 1 has ended"):
            list(stream)
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SHAPE)
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"this machine has {count} GPUs; set it to at most {count}"):
        opened(tmp_path, count + 1)
