"""Workloads: prompts of random tokens with given lengths, repeatable from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cellar.core.errors import ConfigError
from cellar.core.messages import IntArray


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn uniformly from [low, high], both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> LengthRange:
        """`128` or `16-512`. Raises ConfigError that names the option."""
        low, dash, high = text.partition("-")
        try:
            found = cls(int(low), int(high if dash else low))
        except ValueError as error:
            raise ConfigError(
                f"{name} is {text!r}; it must be a length such as 128 or a range such as 16-512."
            ) from error
        if not 1 <= found.low <= found.high:
            raise ConfigError(f"{name} is {text!r}; lengths must be at least 1, and the range must ascend.")
        return found

    def draw(self, count: int, random: np.random.Generator) -> IntArray:
        """int32 [count]."""
        return random.integers(self.low, self.high + 1, count, dtype=np.int32)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts[k] is to be continued by exactly output_lengths[k] tokens."""

    prompts: tuple[list[int], ...]
    output_lengths: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens asked for."""
        return sum(self.output_lengths)


def random_workload(
    num_prompts: int, inputs: LengthRange, outputs: LengthRange, vocab_size: int, max_model_len: int, seed: int
) -> Workload:
    """Uniform lengths, uniform tokens. Raises ConfigError if the longest request would not fit the context."""
    if num_prompts < 1:
        raise ConfigError(f"num_prompts is {num_prompts}; it must be at least 1.")
    if inputs.high + outputs.high > max_model_len:
        raise ConfigError(
            f"{inputs.high} input and {outputs.high} output tokens do not fit the context of {max_model_len}; "
            "lower input_len or output_len."
        )
    random = np.random.default_rng(seed)
    input_lengths = inputs.draw(num_prompts, random)
    output_lengths = outputs.draw(num_prompts, random)
    prompts = tuple(random.integers(0, vocab_size, length).tolist() for length in input_lengths)
    return Workload(prompts, tuple(output_lengths.tolist()))
