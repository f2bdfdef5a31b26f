"""A cost model that is wrong in one place disagrees with what was published, or with what may be counted by hand.

Each check holds for the model as it is; each mutation of it breaks one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cellar.core.hardware import Measure
from cellar.planner.cost import Dimensions
from cellar.planner.linear import by_tensor, phase_group, policy, without_overlap
from cellar.planner.offload import Block, Phase, Problem, Slice, Term, problem
from tests.planner import test_offload as published
from tests.planner.test_offload import JOB, MACHINE, MODELS, PAPER

D: Dimensions = MODELS["30B"]
BATCHES, STAGES = 6, 4


def pipelined(stages: int, sharers: int = 1) -> Problem:
    """A stage of OPT-30B: so many layers less, of a block of BATCHES."""
    block = Block(32, BATCHES)
    return problem(D, MACHINE, JOB, block, Slice(D.layers // stages, stages=stages, sharers=sharers))


ON_HOST = {"weights__host": 1.0, "hidden__host": 1.0, "kv__host__cpu": 1.0}


def seconds(p: Problem, phase: Phase, channel: str | None = None) -> float:
    """Of a phase of the policy with all on the host; of one channel."""
    group = phase_group(p, policy(p, **ON_HOST).shares, phase)
    if channel is None:
        return group.seconds
    return sum(one.seconds for one in group.channels if one.name == channel) * p.repeats(phase)


def check_flexgens_tables() -> None:
    """Table 4 channel by channel, the throughput of table 2, the ablations of table 5."""
    published.test_table_4_channel_by_channel()
    for name, tokens in (("6.7B", 25.26), ("30B", 7.32), ("175B", 0.69)):
        published.test_flexgens_throughput_within_a_factor_of_1_4(name, tokens)
    for name in ("30B", "175B"):
        published.test_ablations_have_the_papers_sign(name)


def check_a_pipeline_fills_and_empties() -> None:
    """A prompt's batches one by one through stages that each work on one at a time, event by event."""
    turn = 1.0
    free = [0.0] * STAGES
    end = 0.0
    for _ in range(BATCHES):
        at = 0.0
        for stage in range(STAGES):
            at = max(at, free[stage]) + turn
            free[stage] = at
        end = at
    whole = seconds(pipelined(STAGES), "prefill")
    assert whole / seconds(pipelined(1), "prefill") * STAGES == pytest.approx(end / (BATCHES * turn), rel=0.02)


def check_stages_hand_on_their_activations() -> None:
    """Over the network, each token's once a stage: two bytes for each of its numbers."""
    p = pipelined(STAGES)
    rate = MACHINE.networks[-1].bandwidth.value * MACHINE.constants.network.value
    nbytes = 2.0 * D.embed * p.block.bls * (JOB.generate - 1)
    assert seconds(p, "decode", "network") == pytest.approx(nbytes / rate)
    slow = replace(MACHINE.networks[-1], bandwidth=Measure(1e5, "bytes/s", "assumed"))
    there = problem(D, replace(MACHINE, networks=(slow,)), JOB, p.block, p.part)
    assert seconds(there, "decode") > 5 * seconds(p, "decode")


def check_attention_is_computed_where_the_cache_lies() -> None:
    """By the CPU: it reads all of the cache, and only queries and results cross the link; by the device: the cache."""
    p = without_overlap(problem(D, MACHINE, JOB, PAPER["30B"][0]))
    cache = p.block.bls * (JOB.prompt + JOB.generate / 2) * D.kv_elements() * 2.0 * D.layers * (JOB.generate - 1)
    by_cpu = policy(p, **ON_HOST)
    there = {one.name: one.seconds for one in phase_group(p, by_cpu.shares, "decode").channels}
    assert there.get("cpu", 0.0) * p.repeats("decode") == pytest.approx(cache / MACHINE.constants.host_attention.value)
    assert by_tensor(p, by_cpu.shares, "decode").get("kv read", 0.0) == 0
    by_device = policy(p, weights__host=1.0, hidden__host=1.0, kv__host__device=1.0)
    moved = by_tensor(p, by_device.shares, "decode")["kv read"]
    assert moved == pytest.approx(cache / MACHINE.to_device.bandwidth.value)
    here = {one.name: one.seconds for one in phase_group(p, by_device.shares, "decode").channels}
    assert here.get("cpu", 0.0) == 0


def check_devices_of_one_host_share_its_memory() -> None:
    """Four stages in one host have a quarter of its bandwidth each, for its memory and for attention."""
    alone, shared = pipelined(STAGES), pipelined(STAGES, sharers=STAGES)
    for channel in ("host memory", "cpu"):
        assert seconds(shared, "decode", channel) == pytest.approx(STAGES * seconds(alone, "decode", channel))


CHECKS = (
    check_flexgens_tables,
    check_a_pipeline_fills_and_empties,
    check_stages_hand_on_their_activations,
    check_attention_is_computed_where_the_cache_lies,
    check_devices_of_one_host_share_its_memory,
)


def check_all() -> None:
    """All of them."""
    for check in CHECKS:
        check()


@pytest.mark.parametrize("check", CHECKS)
def test_the_model_as_it_is(check: Callable[[], None]) -> None:
    check()


def _terms(patch: pytest.MonkeyPatch, change: Callable[[Term], Term | None]) -> None:
    """Every term of every problem is another, or left out."""
    plain = Problem.terms

    def terms(self: Problem, phase: Phase) -> tuple[Term, ...]:
        return tuple(found for term in plain(self, phase) if (found := change(term)) is not None)

    patch.setattr(Problem, "terms", terms)


def no_bubble(patch: pytest.MonkeyPatch) -> None:
    """The stages of a pipeline never wait."""
    patch.setattr(
        Problem,
        "repeats",
        lambda p, phase: p.part.layers * (1.0 if phase == "prefill" else p.job.generate - 1.0),
    )


def no_handover(patch: pytest.MonkeyPatch) -> None:
    """Activations are at the next stage for nothing."""
    _terms(patch, lambda term: None if (term.channel, term.tensor) == ("network", "hidden") else term)


def swapped_sites(patch: pytest.MonkeyPatch) -> None:
    """What the CPU attends to is priced on the device, and the other way round."""
    other = {"cpu": "device", "device": "cpu"}

    def swap(term: Term) -> Term:
        if term.tensor == "compute" and term.vector.any():
            return replace(term, channel=other.get(term.channel, term.channel))
        return term

    _terms(patch, swap)


def shared_host_bandwidth_off(patch: pytest.MonkeyPatch) -> None:
    """Each device has the host for itself."""
    plain = problem
    patch.setitem(
        globals(), "problem", lambda d, m, j, b, part=None: plain(d, m, j, b, part and replace(part, sharers=1))
    )


def mfu_doubled(patch: pytest.MonkeyPatch) -> None:
    """Products reach twice the share of the peak."""
    twice = replace(
        MACHINE.constants, matmul=replace(MACHINE.constants.matmul, value=2 * MACHINE.constants.matmul.value)
    )
    patch.setattr(published, "MACHINE", replace(MACHINE, constants=twice))


MUTATIONS = (no_bubble, no_handover, swapped_sites, shared_host_bandwidth_off, mfu_doubled)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_mutation_fails(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check_all()
