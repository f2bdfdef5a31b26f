"""Hand-made step plans, small random models, and what a dense computation says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellar.core.messages import Emit, RowOpen, Source, Spans, StepPlan, StepResult, TableUpdate
from cellar.core.sampling import SamplingParams
from cellar.models.loader import LoadedWeights, dummy
from cellar.models.model import Model
from cellar.models.registry import open_model
from cellar.runtime.steps.local import LocalRuntime
from tests.models.dense_context import logits_of

CHUNK = 16
GREEDY = SamplingParams(temperature=0.0)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def tiny_model(dtype: str = "float32", **changes: Any) -> tuple[Model, LoadedWeights]:
    """A random Llama with two chunks and a bit of context in most tests."""
    model = open_model({**CONFIG, **changes}, dtype, CHUNK)
    weights = dummy(model.spec, seed=3)
    # Larger than the loader's scale, so that the best token is clearly the best.
    for tensor in (*weights.head.values(), *weights.embedding.values()):
        tensor.mul_(4.0)
    return model, weights


def reference(model: Model, weights: LoadedWeights, tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of a whole sequence, computed densely."""
    return logits_of(model, weights, torch.tensor(tokens), [len(tokens)])


def greedy(model: Model, weights: LoadedWeights, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, each from a computation of the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(model, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], length)]


@dataclass
class Step:
    """Collects one plan in words."""

    number: int
    _spans: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _targets: list[int] = field(default_factory=list)
    _table: list[tuple[int, int, int]] = field(default_factory=list)
    _opens: list[RowOpen] = field(default_factory=list)
    closes: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()

    def open(self, row: int, params: SamplingParams = GREEDY, **more: Any) -> Step:
        """Give the row to a request."""
        self._opens.append(RowOpen(row, params, **more))
        return self

    def place(self, row: int, slots: Sequence[int], first: int = 0) -> Step:
        """The row's chunks `first`, `first` + 1, ... lie in these slots."""
        self._table += [(row, first + n, slot) for n, slot in enumerate(slots)]
        return self

    def prompt(
        self, row: int, tokens: Sequence[int], start: int = 0, emit: Emit = Emit.LAST, targets: Sequence[int] = ()
    ) -> Step:
        """Tokens from the host at positions from `start`."""
        self._spans.append((row, start, start + len(tokens), Source.HOST, emit))
        self._tokens += tokens
        self._targets += targets
        return self

    def decode(self, row: int, position: int) -> Step:
        """The row's last token, from the device."""
        self._spans.append((row, position, position + 1, Source.DEVICE, Emit.LAST))
        return self

    def plan(self) -> StepPlan:
        """The plan."""
        spans = np.array(self._spans, np.int32).reshape(-1, 5).T.copy()
        table = np.array(self._table, np.int32).reshape(-1, 3).T.copy()
        return StepPlan(
            step=self.number,
            spans=Spans(*spans),
            tokens=np.array(self._tokens, np.int32),
            table=TableUpdate(*table),
            opens=tuple(self._opens),
            closes=self.closes,
            targets=np.array(self._targets, np.int32) if self._targets else None,
            masked_rows=self.masked,
        )


def story() -> list[Step]:
    """Whole and chunked prompts, a shared prefix, holes with a tail, decodes, scores, several ways to sample."""
    a, b, c = prompt_of(40, 1), prompt_of(21, 2), prompt_of(2 * CHUNK, 3)
    none = np.empty(0, np.int32)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=4, logprobs=4)
    punished = SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 2.0}, min_tokens=3)
    scored = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=3)
    return [
        Step(0)
        .open(0, SamplingParams(temperature=0.0, logprobs=5))
        .place(0, [3, 17, 4])
        .prompt(0, a[:19], emit=Emit.NONE)
        .open(2, drawn)
        .place(2, [5, 6])
        .prompt(2, b),
        Step(1)
        .decode(2, 21)
        .prompt(0, a[19:], 19)
        .open(3, scored)
        .place(3, [20, 21, 22])
        .prompt(3, c, emit=Emit.ALL, targets=[*c[1:], -1]),
        Step(2)
        .decode(0, 40)
        .decode(2, 22)
        .decode(3, 2 * CHUNK)
        .open(5, punished, prompt=np.array([*c, 9], np.int32), output=none, stop_ids=(7,))
        .place(5, [20, 21, 23])
        .prompt(5, [9], 2 * CHUNK),
        Step(3).decode(0, 41).decode(2, 23).decode(5, 2 * CHUNK + 1),
        Step(4)
        .open(6)
        .place(6, [30, 21, 31])
        .prompt(6, c[:CHUNK], emit=Emit.NONE)
        .prompt(6, [1, 2, 3], 2 * CHUNK)
        .decode(5, 2 * CHUNK + 2),
    ]


def runtime_of(
    model: Model,
    weights: LoadedWeights,
    num_slots: int = 32,
    num_rows: int = 8,
    device: str = "cpu",
    enforce_eager: bool = False,
) -> LocalRuntime:
    """A runtime with one thread, so that tests do not fight for cores; on a GPU it captures short prompts, too."""
    return LocalRuntime(
        model,
        weights,
        num_slots=num_slots,
        num_rows=num_rows,
        device=torch.device(device),
        num_threads=1,
        most_tokens=200,
        enforce_eager=enforce_eager,
    )


def run(runtime: LocalRuntime, *steps: Step, timeout: float = 60.0) -> list[StepResult]:
    """Submit all steps at once and wait for all results."""
    worker = runtime.workers[0]
    for step in steps:
        worker.submit(step.plan())
    return results(runtime, len(steps), timeout)


def results(runtime: LocalRuntime, count: int, timeout: float = 60.0) -> list[StepResult]:
    """The next `count` results."""
    found: list[StepResult] = []
    while len(found) < count:
        more = runtime.poll(timeout)
        assert more, "the runtime does not answer"
        found += [result for result in more if isinstance(result, StepResult)]
    return found


def tokens_of(result: StepResult) -> list[int]:
    """The sampled tokens; the step must have gone well."""
    assert result.error is None, result.error
    return [int(t) for t in result.tokens[:, 0]]
