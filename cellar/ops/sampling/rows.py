"""How the rows of a step sample, as columns, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellar.core.sampling import SamplingParams

# Rows below this temperature take the best token: (x - m) / temperature would overflow.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of p rows of a batch.

    Row `rows[i]` of the batch has its tokens in row `slots[i]` of two stores that live as long as requests do.
    rows, slots: int64 [p]; prompt: bool [slots, vocab], the prompt's tokens; output: int32 [slots, vocab], how often
    each token was put out; repetition, frequency, presence: float32 [p].
    """

    rows: Tensor
    slots: Tensor
    prompt: Tensor
    output: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """values[i] is added to logits[rows[i], tokens[i]]: int64, int64, float32, all [b]."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Bans:
    """Token tokens[i] is impossible in row rows[i] while its output index is below until[i]: int64, all [b]."""

    rows: Tensor
    tokens: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Row rows[i] may choose token t only if bit t % 32 of bits[i, t // 32] is set: int64 [m], int32 [m, words]."""

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How the n rows of one step sample. Tensors lie on the logits' device; `greedy` and `cut` are known to the host.

    seed, output_index: int64 [n]; temperature, top_p, min_p: float32 [n]; top_k: int64 [n], 0 for all tokens.
    greedy: no row draws (all temperatures are 0); cut: some row that draws has top_k or top_p.
    logprob_rows: int64 [m], the rows that want log-probabilities, with the num_logprobs best tokens; None for none.
    """

    seed: Tensor
    output_index: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool
    cut: bool
    penalties: Penalties | None = None
    biases: Biases | None = None
    bans: Bans | None = None
    masks: Masks | None = None
    logprob_rows: Tensor | None = None
    num_logprobs: int = 0

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        output_index: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        stop_ids: Mapping[int, Sequence[int]] | None = None,
        penalties: Penalties | None = None,
    ) -> SamplingRows:
        """Rows that sample by `params` (seeds set), having put out `output_index` tokens each.

        stop_ids: by row, the tokens that are banned until min_tokens. penalties: of the rows whose params are
        `penalized`; their stores live longer than a step, so the caller has them.
        """
        draws = [p.temperature >= LEAST_TEMPERATURE for p in params]
        floats = np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32).reshape(-1, 3)
        integers = np.array(
            [(p.seed or 0, k, max(p.top_k, 0)) for p, k in zip(params, output_index, strict=True)], np.int64
        )
        temperature, top_p, min_p = torch.from_numpy(np.ascontiguousarray(floats.T)).to(device)
        seed, index, top_k = torch.from_numpy(np.ascontiguousarray(integers.reshape(-1, 3).T)).to(device)

        def integer_tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        added = [(r, t, v) for r, p in enumerate(params) for t, v in (p.logit_bias or {}).items()]
        banned = [
            (r, t, params[r].min_tokens) for r, ids in (stop_ids or {}).items() for t in ids if params[r].min_tokens
        ]
        asking = [r for r, p in enumerate(params) if p.logprobs is not None]
        return cls(
            seed=seed,
            output_index=index,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            greedy=not any(draws),
            cut=any(d and (p.top_k > 0 or p.top_p < 1) for d, p in zip(draws, params, strict=True)),
            penalties=penalties,
            biases=Biases(
                integer_tensor([r for r, _, _ in added]),
                integer_tensor([t for _, t, _ in added]),
                torch.tensor([v for _, _, v in added], dtype=torch.float32).to(device),
            )
            if added
            else None,
            bans=Bans(*(integer_tensor(column) for column in zip(*banned, strict=True))) if banned else None,
            logprob_rows=integer_tensor(asking) if asking else None,
            num_logprobs=max((params[r].logprobs or 0 for r in asking), default=0),
        )

    @property
    def adjusted(self) -> bool:
        """True if logits change before the choice."""
        return not (self.penalties is None and self.biases is None and self.bans is None and self.masks is None)


class Choice(NamedTuple):
    """tokens: int64 [n]; finite: bool [n], False where the row has no token to choose, which is then 0."""

    tokens: Tensor
    finite: Tensor


class TokenLogprobs(NamedTuple):
    """Of t tokens. logprob: float32 [t]; rank: int64 [t], how many tokens are at least as probable (1 is best);
    top_ids: int64 [t, n] and top_logprobs: float32 [t, n], the n best, descending."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [n]; finite: bool [n]; logprobs: of the rows that asked, in the order of `logprob_rows`."""

    tokens: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None = None
