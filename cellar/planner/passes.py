"""What a pass of a model whose weights are streamed takes, from the rates of its channels, and within which bound.

The weights that lie elsewhere are moved while the device computes with those that have come, so a pass takes the longer
of both. Link and disk are at work at once; a processor multiplies what host memory has as it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec
from cellar.planner.cost import dimensions
from cellar.planner.moves import NO_FEW, RECORDED_LAUNCHES, Away, Few, Moves, attends, channels_moved, pass_moves
from cellar.planner.offload import Job, Schedule
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits, SavedPlan
from cellar.planner.work import StepCost, StepWork, coming

RESERVE = 0.1
"""Of the chunks of KV, what the scheduler keeps free when it admits requests whose full lengths may find none."""

BY_CODES = 3.8
"""Times as long as a token of a prompt takes one of few that are multiplied by codes, if nobody has measured it: 174
decodes of OPT-30B in int4 beside 8,018 tokens of prompts on an H200, 17.7 ms in twelve layers with 2.1 in which the
weights are read (docs/log/offload.md).
"""

PROMPT_SHARE = 0.96
"""Of the FLOP/s of a layer's products alone, what those of a step of prompts have: attention is in it, some 4 % of
OPT-6.7B's steps of 512 tokens a prompt (docs/log/offload.md). Norms, activations and what K and V are kept by are not.
"""

LAYER_LAUNCHES = 8e-4
"""Seconds in which a layer's kernels are launched one by one: on an H200's host 18 to 25 ms for 32 layers, and 0.87 ms
a layer of Llama-3-8B's passes that nothing else explained (docs/log/offload.md). So of passes with prompts.
"""


def channel_seconds(cost: StepCost, moves: Moves, work: StepWork) -> dict[str, float]:
    """Seconds by channel of a pass, all of which work at once: disk, link, cpu and device. Their names are those of
    what is measured (`runtime/offload/channels.py`).
    """
    none = dict.fromkeys(("streamed", "few_streamed", "few_rows", "few_each", "eager"), 0.0)
    alone = replace(cost, **none, beside=False)  # type: ignore[arg-type]
    device = replace(alone, attended=0.0, resident=0.0).seconds(work)
    attention = alone.seconds(work) - device
    few = work.tokens <= moves.few
    if not moves.link:  # a processor, which computes itself
        disk, link = coming(moves.disk, device + attention, moves.idle), 0.0
    else:
        disk, link = moves.disk, coming(moves.link, attention if moves.attends else 0.0, moves.idle)
    return {
        "disk": disk,
        "link": moves.few_link if few else link,
        "cpu": (moves.few_rows + moves.few_each * (work.tokens - 1) if few else 0.0)
        + (attention if moves.attends else 0.0),
        "device": device + (0.0 if moves.attends else attention),
    }


LINK_READS_OF_CODES = 0.7
"""`LINK_READS` of K and V in fewer bits, which a kernel brings to the device first: it reaches 0.92 alone, and weights
cross the link beside it (docs/log/offload.md).
"""

LEAST_OVER_LINK = 0.05
"""A smaller share of KV is not worth the launches."""

MOST_OVER_LINK = 0.5
"""Of KV in host memory. In fewer bits it is brought to the device a layer at a time, which has room for so much."""


def kv_over_link(spec: ModelSpec, rates: Rates, away: Away, positions: float) -> float:
    """The share of `positions` in host memory to which the device attends over the link, while the CPU attends to the
    others: both end together, weights that cross the link counted.
    """
    if not attends(away) or not rates.reads or not positions:
        return 0.0
    kv = positions * spec.kv.chunk_nbytes() / spec.kv.chunk_size
    spare = kv / rates.attention - max(channels_moved(rates, away))
    share = min(MOST_OVER_LINK, spare / (kv / rates.attention + kv / rates.reads))
    return share if share >= LEAST_OVER_LINK else 0.0


def pass_cost(spec: ModelSpec, rates: Rates, away: Away, few: Few = NO_FEW, over_link: float = 0.0) -> StepCost:
    """The price of any pass. One of `few` tokens on a GPU leaves rows to the CPU (`few_tokens`); the device attends to
    the share `over_link` of KV in host memory (`kv_over_link`) while the CPU attends to the rest.
    """
    d, moves = dimensions(spec), pass_moves(spec, rates, away, few)
    launches = eager = waits = 0.0
    if away.kind != "cpu" and (away.host or away.disk or moves.attends):
        # Decodes have graphs, and prompts have none; a pass that the CPU attends in waits for it in each layer.
        launches, eager = len(spec.layers) * RECORDED_LAUNCHES, len(spec.layers) * LAYER_LAUNCHES
        waits = len(spec.layers) * rates.exchange if moves.attends else 0.0
    beside, between = (launches, waits) if rates.runs_ahead else (0.0, launches + waits)
    each = spec.kv.chunk_nbytes() / spec.kv.chunk_size
    token = 2.0 * d.layers * d.layer_elements / rates.flops
    if rates.copies:
        token += between_products(spec) / rates.copies
    few_token = 2.0 * d.layers * d.layer_elements / rates.few_flops if rates.few_flops else token
    if not rates.few_flops and any(tensor.formats for layer in spec.layers for tensor in layer.tensors):
        few_token = BY_CODES * token
    return StepCost(
        token_flops=token,
        token_bytes=0.0,
        weights=sum(layer.nbytes for layer in spec.layers) / rates.device,
        attended=0.0,
        resident=(1 - over_link) * each / _attending(rates, away),
        sampled=2.0 * d.head_elements / rates.flops if spec.head else 0.0,
        head=sum(tensor.nbytes for tensor in spec.head) / rates.device,
        launches=between,
        eager=eager,
        windows=d.windows if any(d.windows) else (),
        streamed=max(moves.disk, moves.link, beside),
        idle=moves.idle if (moves.link or moves.disk) > max(moves.disk if moves.link else 0.0, beside) else 1.0,
        few=few.most if moves.few_rows else 0,
        few_streamed=max(moves.disk, moves.few_link, beside) if moves.few_rows else 0.0,
        few_rows=moves.few_rows + moves.few_waits,
        few_each=moves.few_each + moves.few_sent,
        beside=moves.attends,
        apart=max(0.0, few_token - token) if away.kind != "cpu" else 0.0,
    )


def between_products(spec: ModelSpec) -> float:
    """Bytes that a token of a prompt has kernels read and write between the products of all layers: residual, what is
    added to it and its norm, q, k and v turned and kept, activations.
    """
    d = dimensions(spec)
    norms = (1 if d.parallel else 2) * 4 * d.embed
    turned = 2 * (d.heads + 2 * d.kv_heads) * d.head_dim
    activated = (3 if d.gated else 2) * d.mlp
    return d.layers * (norms + turned + activated) * DTYPE_BYTES[spec.dtype]


def _attending(rates: Rates, away: Away) -> float:
    """Bytes/s of attention of decodes."""
    if away.kv_place == "host" or away.kind == "cpu":
        return rates.attention
    return rates.device_attention or rates.device


def decode_seconds(cost: StepCost, sequences: int, context: float) -> float:
    """Seconds of a pass in which so many sequences get a token each, at so many positions."""
    return cost.seconds(_decodes(cost, sequences, context))


def _decodes(cost: StepCost, sequences: int, context: float) -> StepWork:
    seen = context
    if cost.windows:
        seen = sum(min(window or context, context) for window in cost.windows) / len(cost.windows)
    return StepWork(sequences, sequences, sequences * seen, sequences * seen, False, sequences)


def block_seconds(cost: StepCost, job: Job, sequences: int, limits: Limits, order: Schedule = "zigzag") -> float:
    """Seconds from the first prompt of so many sequences to the last token of all (FlexGen §4.3, latency); in diagonal
    order those of one of them, while the others are of all ages.
    """
    if order == "diagonal":
        return job.generate * diagonal_seconds(cost, job, sequences)
    tokens = sequences * job.prompt
    found = 0.0
    while tokens > 0:
        now = min(tokens, limits.max_num_batched_tokens)
        spans = -(-now // job.prompt)
        found += cost.seconds(StepWork(now, spans, now * job.prompt / 2, spans * job.prompt, True))
        tokens -= now
    return found + (job.generate - 1) * decode_seconds(cost, sequences, job.prompt + job.generate / 2)


def diagonal_seconds(cost: StepCost, job: Job, sequences: int) -> float:
    """Seconds of a pass in which sequences of all ages have a token each, of which so many n-th parts begin with their
    prompts (§A.2).
    """
    new = sequences / job.generate
    old = sequences - new
    context, prompt = old * (job.prompt + job.generate / 2), new * job.prompt
    tokens = round(old + prompt)
    attended = context + prompt * job.prompt / 2
    return cost.seconds(StepWork(tokens, sequences, attended, context + prompt, True, round(old)))


def most_within(seconds: float, cost: StepCost, job: Job, limits: Limits, order: Schedule = "zigzag") -> int:
    """How many sequences end within the bound, at most those of the limits; 0 if not even one does."""
    low, high = 0, limits.max_num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if block_seconds(cost, job, middle, limits, order) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a plan predicts: `sequences` get a token each in a pass of `pass_seconds`. From the first of `prompt` tokens
    to the last of `generate` it takes `request_seconds`, prompts of the others included. So many `passes` are on their
    way at once, one in each stage of a pipeline, of sequences of their own.
    """

    sequences: int
    prompt: int
    generate: int
    pass_seconds: float
    tokens_per_second: float
    request_seconds: float
    passes: int = 1


def foreseen(
    cost: StepCost, job: Job, sequences: int, limits: Limits, order: Schedule = "zigzag", passes: int = 1
) -> Foreseen:
    """The prediction for so many sequences a pass of a job. `cost` is that of one stage, which has each of the passes
    in turn: in the time of one it gives the tokens of one, and a sequence waits for the others.
    """
    whole = block_seconds(cost, job, sequences, limits, order)
    seconds = decode_seconds(cost, sequences, job.prompt + job.generate / 2)
    if order == "diagonal":
        seconds = diagonal_seconds(cost, job, sequences)
    rate = sequences * job.generate / whole
    return Foreseen(sequences, job.prompt, job.generate, seconds, rate, passes * whole, passes)


def predicted_line(plan: SavedPlan) -> str:
    """What a plan that streams weights predicts, in words; nothing if it predicts nothing."""
    found = plan.figures.get("predicted")
    if not found:
        return ""
    count, passes = found["sequences"], found.get("passes", 1)
    at_once = f", {passes} passes at once" if passes > 1 else ""
    return (
        f"predicted: {found['tokens_per_second']:.3g} tok/s, {count:,} sequence{'s' * (count != 1)} a pass of "
        f"{found['pass_seconds']:.3g} s{at_once}; requests of {found['prompt']:,} + {found['generate']:,} tokens end "
        f"within {found['request_seconds']:.3g} s."
    )


def predicted_rate(plan: SavedPlan | None, sequences: int) -> float | None:
    """Tokens per second that a plan which streams weights promises for so many sequences; None if it says nothing."""
    said = None if plan is None else plan.figures.get("predicted")
    if plan is None or not said or plan.cost is None or plan.limits is None or plan.placement.block is None:
        return None
    count = max(1, min(-(-sequences // said.get("passes", 1)), said["sequences"]))
    job = Job(said["prompt"], said["generate"])
    return foreseen(plan.cost, job, count, plan.limits, plan.placement.block.order).tokens_per_second


def too_slow(wish: float, fastest: float, job: Job) -> ConfigError:
    """No plan keeps the bound."""
    return ConfigError(
        f"a latency of {wish:g} s is impossible: one request of {job.prompt} + {job.generate} tokens takes "
        f"{fastest:.3g} s at best; ask for {rounded_up(fastest)} or more, for shorter requests (max_model_len), or "
        "raise device_memory."
    )


def rounded_up(value: float) -> str:
    """A number rounded up to three figures."""
    text = f"{value:.3g}"
    return text if float(text) >= value else f"{value * 1.005:.3g}"


def longest(limits: Limits) -> Job:
    """The job that takes longest of all requests of these lengths: each token a pass of its own."""
    return Job(1, limits.max_model_len - 1)


def kv_sequences(spec: ModelSpec, limits: Limits, nbytes: int, job: Job | None = None) -> int:
    """How many sequences so many bytes of KV hold, as limited; at least one. All of full length, or, of a `job` in
    diagonal order, of all ages, beside what the scheduler keeps free.
    """
    size, held = spec.kv.chunk_size, nbytes // spec.kv.chunk_nbytes()
    found = held // -(-limits.max_model_len // size)
    if job is not None:
        each = (job.prompt + job.generate / 2) / size + 0.5  # the last chunk is half full
        found = int(held * (1 - RESERVE) / each)
    return max(1, min(limits.max_num_seqs, found))


def predicted_pass(
    spec: ModelSpec, rates: Rates, away: Away, few: Few, count: int, context: int, over_link: float = 0.0
) -> Mapping[str, float]:
    """Seconds by channel, which work at once, of a pass in which so many sequences decode, at a context of so many
    tokens each. What the device reads over the link is the device's.
    """
    cost = pass_cost(spec, rates, away, over_link=over_link)
    return channel_seconds(cost, pass_moves(spec, rates, away, few), _decodes(cost, count, context))
