"""Weights in int4 on a GPU: what its engine says is what the CPU's says with the definition, but for ties."""

from __future__ import annotations

import pytest
import torch

from cellar import LLM
from cellar.ops.cuda.hopper import hopper_available
from cellar.quant.nibbles import NibbleWeight
from tests.e2e.test_quantized_kv_gpu import answers, lost, prompts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

TIE = 0.35
"""By how much less likely than the CPU's best token, in bfloat16, one may be that the GPU's engine takes."""


def engine(device: str, **options: object) -> LLM:
    """The model that ships."""
    return LLM(
        dtype="bfloat16", device=device, quantization="int4", kv_cache_memory_bytes=2**27, max_model_len=256, **options
    )  # type: ignore[arg-type]


def test_tokens_are_the_cpus_but_for_ties() -> None:
    with engine("cuda") as llm:
        prompts = prompts_of(llm)
        together = answers(llm, prompts)
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
    with engine("cuda", enforce_eager=True, max_num_batched_tokens=32) as llm:
        pieces = answers(llm, prompts)
    with engine("cpu") as judge:
        for found in (together, alone, pieces):
            assert max(lost(judge, prompts, found)) < TIE


@pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)
def test_on_hopper_it_is_the_kernel_of_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    multiply = NibbleWeight.multiply

    def counted(self, x, bias=None):  # type: ignore[no-untyped-def]
        nonlocal made
        made += 1
        return multiply(self, x, bias)

    monkeypatch.setattr(NibbleWeight, "multiply", counted)
    with engine("cuda", enforce_eager=True) as llm:
        answers(llm, prompts_of(llm))
    assert made > 0
