"""transformers.generate as the peer of offline runs: static batches, padded on the left, greedy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cellar.bench.workload import Workload
from cellar.core.extras import missing

T = TypeVar("T")


@dataclass(frozen=True)
class Reached:
    """What a run has done: requested tokens, seconds, and whether that is all of it."""

    num_tokens: int
    seconds: float
    complete: bool

    @property
    def rate(self) -> float:
        """Requested tokens per second."""
        return self.num_tokens / self.seconds


ORDERS = ("given", "by input", "by output")


class TransformersPeer:
    """A checkpoint in transformers. Raises ConfigError where the package is not installed."""

    def __init__(self, checkpoint: Path, dtype: str, device: str) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise missing("comparing needs", "transformers", "bench") from error
        self._device = device

        def loaded() -> Any:
            return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()

        self._model = _apart(loaded)
        config = self._model.generation_config
        config.eos_token_id, config.do_sample = None, False
        config.temperature = config.top_p = config.top_k = None
        config.pad_token_id = 0

    def run(self, workload: Workload, batch_size: int, order: str, limit: float = math.inf) -> Reached:
        """Do a workload in static batches, each until its longest output is done, for up to `limit` seconds.

        Orders: `given`, or sorted `by input` or `by output` length, so that a batch pads or idles less.
        """
        lengths = workload.output_lengths
        keys = {"given": None, "by input": lambda k: len(workload.prompts[k]), "by output": lambda k: lengths[k]}
        ranks = list(range(len(lengths)))
        if keys[order] is not None:
            ranks.sort(key=keys[order])

        def all_batches() -> Reached:
            started = time.perf_counter()
            done = 0
            for first in range(0, len(ranks), batch_size):
                batch = ranks[first : first + batch_size]
                left = limit - (time.perf_counter() - started)
                if left > 0:
                    made = self._made([workload.prompts[k] for k in batch], max(lengths[k] for k in batch), left)
                    done += sum(min(lengths[k], made.shape[1]) for k in batch)
            return Reached(done, time.perf_counter() - started, done == workload.num_output_tokens)

        return _apart(all_batches)

    def tokens(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """`count` tokens for each prompt, as one batch padded on the left."""
        found: list[list[int]] = self._made(prompts, count, math.inf).tolist()
        return found

    def _made(self, prompts: list[list[int]], count: int, limit: float) -> torch.Tensor:
        """The tokens [prompts, made]: `count` of them, or fewer if `limit` seconds have passed (each step ends)."""
        width = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for k, prompt in enumerate(prompts):
            tokens[k, width - len(prompt) :] = torch.tensor(prompt)
            mask[k, width - len(prompt) :] = 1
        with torch.inference_mode():
            made = self._model.generate(
                tokens.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=count,
                min_new_tokens=count,
                max_time=None if limit == math.inf else limit,
            )
        if limit == math.inf and made.shape[1] != width + count:
            raise RuntimeError(f"transformers made {made.shape[1] - width} tokens, but {count} were asked for")
        new: torch.Tensor = made[:, width:]
        return new


def _apart(work: Callable[[], T]) -> T:
    """In a thread that ends: its idle OpenMP team would slow the other side's turn (docs/log/cpu-engine.md)."""
    with ThreadPoolExecutor(1, "cellar-peer") as thread:
        return thread.submit(work).result()
