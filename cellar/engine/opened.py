"""Opening a model: weights, tokenizer and engine, and a front over them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cellar import demo
from cellar.core.config import EngineConfig, ModelConfig
from cellar.core.errors import BuffersError, CapacityError, ConfigError
from cellar.core.messages import Outlook, StepPlan, Tier
from cellar.core.specs import ModelSpec
from cellar.engine.front import Front
from cellar.engine.own_plan import held_if_too_large, with_own_plan, with_rank_plans
from cellar.engine.plan import check_here, with_plan
from cellar.engine.prompts import PromptReader
from cellar.engine.steps import step_engine
from cellar.kv.costs import model_costs
from cellar.kv.identity import root_identity
from cellar.kv.policy import named_policy
from cellar.kv.recovery import Recovery, RecoveryRule
from cellar.planner.saved import SavedPlan
from cellar.routing.basis import Basis
from cellar.routing.digest import DigestShape
from cellar.routing.drain import written
from cellar.runtime.memory import human
from cellar.runtime.offload.opened import OffloadReport
from cellar.runtime.protocol import Capacity, Runtime
from cellar.runtime.steps.memory_use import MemoryUse
from cellar.text.chat import ChatTemplate
from cellar.text.generation import NEUTRAL, GenerationConfig, read_generation_config
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cellar.runtime.ranks.opened import OpenedRanks
    from cellar.runtime.steps.local import OpenedModel
    from cellar.schedule.steps.homes import HomesScheduler
    from cellar.schedule.steps.scheduler import StepScheduler

_LOG = logging.getLogger(__name__)

Wrap = Callable[[Runtime[StepPlan]], Runtime[StepPlan]]

ATTEMPTS = 3
"""To open a model by a plan of ours. Each leaves some memory behind: the library keeps a piece for every stream."""

SPARED = 2**26
"""Bytes of a device left free beyond what a first plan missed: an allocator's pieces are never the same twice."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A front, and what it was opened with: everything in `config` is decided.

    `offloads`: where the weights lie, of each rank, if they are streamed; `offload`, if that goes on in this process.
    Of an engine of this process, `outlook` is what routers are told; the engine's thread may ask. `basis` is what they
    must know of the model.
    """

    front: Front
    config: EngineConfig
    spec: ModelSpec
    checkpoint: Path | None
    generation: GenerationConfig = NEUTRAL
    plan: SavedPlan | None = None
    memory: MemoryUse | None = None
    offload: OffloadReport | None = None
    outlook: Callable[[], Outlook] | None = None
    basis: Basis | None = None
    offloads: Sequence[OffloadReport] = ()


def open_front(
    config: EngineConfig,
    wrap: Wrap = lambda runtime: runtime,
    persist_seconds: float = 30.0,
    recovery: RecoveryRule = "faster",
) -> Opened:
    """Load a model and its tokenizer, and put an engine over them.

    `wrap` may put something between engine and runtime, e.g. a meter. Closing takes `persist_seconds` at most to bring
    KV to tiers that outlive the process. `recovery` may force that chunks of slower tiers are loaded, or computed
    again, whichever is faster. Raises CheckpointError, ConfigError,
    CapacityError or DeviceError.
    """
    from cellar.runtime.ranks.opened import OpenedRanks

    config, plan = with_plan(config)
    checkpoint = checkpoint_of(config.model)
    if plan is not None:
        check_here(plan, config, checkpoint)
    if plan is None and config.offload.device_memory is None:
        config = held_if_too_large(config, checkpoint)
    asked = config if plan is None and config.offload.device_memory is not None else None
    plans = [] if plan is None else [plan]
    if asked is not None:
        config, plans = _own_plans(asked, checkpoint)
    # The cheap part first: a damaged tokenizer is found before gigabytes are read.
    tokenizer, templates = open_text(config.model, checkpoint)
    generation = read_generation_config(config.model.generation_config, checkpoint)
    try:
        opened, config, plans = _open_planned(config, plans, asked, checkpoint)
        plan = _slowest(plans)
        config, spec, capacity = opened.config, opened.spec, opened.runtime.capacity
        costs, root = model_costs(spec), root_identity(spec, opened.fingerprint)
        scheduler = _scheduler(config, capacity, costs, root, recovery, _is_diagonal(plan))
    except MemoryError as error:
        raise CapacityError(
            f"this machine's memory does not hold the bookkeeping for {config.schedule.max_num_seqs} requests; "
            "lower max_num_seqs or max_model_len."
        ) from error
    reader = open_reader(spec, capacity.max_model_len, tokenizer, config.model.seed, generation)
    masker = None
    if tokenizer is not None:
        masker = Masker(GrammarCompiler(tokenizer, spec.vocab_size, reader.eos_token_ids, time.perf_counter))
    basis = Basis(
        root if config.cache.enable_prefix_caching else None,
        capacity.chunk_size,
        costs,
        DigestShape.of({Tier.DEVICE: capacity.num_slots * capacity.homes, **capacity.tiers}),
    )
    engine = step_engine(
        scheduler,
        wrap(opened.runtime),
        run_ahead=config.steps_ahead,
        persist_seconds=persist_seconds,
        masker=masker,
        mask_timeout=config.schedule.mask_timeout,
        lookup=opened.runtime.lookup,
        leaving=partial(written, basis),
    )
    scheduler.restore(capacity.kept, engine.clock())
    return Opened(
        Front(engine, reader, tokenizer, templates),
        config,
        spec,
        checkpoint,
        generation,
        plan,
        opened.memory,
        None if isinstance(opened, OpenedRanks) else opened.offload,
        scheduler.outlook,
        basis,
        opened.offloads,
    )


def _own_plans(asked: EngineConfig, checkpoint: Path | None, spared: int = 0) -> tuple[EngineConfig, list[SavedPlan]]:
    """The options within `device_memory`, and a plan for what each rank streams, if they do not hold the model."""
    if asked.device.num_ranks > 1:
        return with_rank_plans(asked, checkpoint, spared)
    config, plan = with_own_plan(asked, checkpoint, spared)
    return config, [] if plan is None else [plan]


def _slowest(plans: Sequence[SavedPlan]) -> SavedPlan | None:
    """Of the plans of ranks, that of which the others wait: it says what is to be expected of all."""
    if len(plans) < 2:
        return plans[0] if plans else None
    return min(plans, key=lambda plan: plan.figures["predicted"]["tokens_per_second"])


def _open_planned(
    config: EngineConfig, plans: list[SavedPlan], asked: EngineConfig | None, checkpoint: Path | None
) -> tuple[OpenedModel | OpenedRanks, EngineConfig, list[SavedPlan]]:
    """A model by its plans. Those that were made here, for what is `asked`, and leave too little for the buffers of a
    step are made again, with as much left as they have taken, and at last given up.
    """
    spared, attempt = 0, 1
    while True:
        try:
            return _opened_by(config, plans, checkpoint), config, plans
        except BuffersError as error:
            if asked is None or not plans or attempt == ATTEMPTS:
                raise
            missing = error.missing  # and nothing else of it: the error holds what was opened
        _LOG.warning(
            "a step's buffers take %s more than was expected; the model is planned again with so much left for them.",
            human(missing),
        )
        spared, attempt = spared + missing + SPARED, attempt + 1
        config, plans = _own_plans(asked, checkpoint, spared)


def _opened_by(config: EngineConfig, plans: Sequence[SavedPlan], checkpoint: Path | None) -> OpenedModel | OpenedRanks:
    """A model by its plan, or by those of the ranks that stream it."""
    from cellar.runtime.ranks.opened import open_ranks
    from cellar.runtime.steps.local import open_local

    placements = [plan.placement for plan in plans]
    if placements and placements[0].kind == "partition":
        return open_ranks(config, checkpoint, placements[0])
    if config.device.num_ranks > 1:
        return open_ranks(config, checkpoint, offloaded=placements)
    return open_local(config, checkpoint, placements[0] if placements else None, root_identity)


def _scheduler(
    config: EngineConfig,
    capacity: Capacity,
    costs: dict[int, float],
    root: bytes,
    recovery: RecoveryRule,
    diagonal: bool,
) -> StepScheduler | HomesScheduler:
    """What decides over a runtime of this capacity: one scheduler, or one for each home of its rows."""
    from cellar.schedule.steps.homes import HomesScheduler, shares
    from cellar.schedule.steps.scheduler import StepScheduler

    num_rows = capacity.num_rows // capacity.homes
    found = [
        StepScheduler(
            capacity.num_slots,
            num_rows,
            capacity.chunk_size,
            capacity.max_model_len,
            schedule,
            config.cache.enable_prefix_caching,
            root=root,
            tiers=capacity.tiers,
            policy=named_policy(config.cache.kv_eviction_policy, costs, bool(capacity.tiers)),
            recovery=Recovery(recovery, costs),
            diagonal=diagonal,
            stages=config.device.pipeline_parallel_size,
        )
        for schedule in shares(config.schedule, capacity.homes)
    ]
    return found[0] if capacity.homes == 1 else HomesScheduler(found, num_rows)


def _is_diagonal(plan: SavedPlan | None) -> bool:
    """Whether the plan wants its sequences to begin one after another."""
    return plan is not None and plan.placement.block is not None and plan.placement.block.order == "diagonal"


def open_reader(
    spec: ModelSpec, max_model_len: int, tokenizer: Tokenizer | None, seed: int, generation: GenerationConfig
) -> PromptReader:
    """The reader of a model's prompts; an answer ends where any of the model's files says so."""
    named = (*spec.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()), *generation.eos_token_ids)
    ends = [end for end in named if 0 <= end < spec.vocab_size]  # a tokenizer may know more than the model
    return PromptReader(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        tokenizer=tokenizer,
        seed=seed,
    )


def checkpoint_of(model: ModelConfig) -> Path | None:
    """Where the checkpoint is; None for dummy weights of a config that ships with the package."""
    from cellar.models.hub import resolve
    from cellar.models.registry import shipped_config

    if model.model is None:
        return demo.path()
    if model.load_format == "dummy" and shipped_config(model.model) is not None:
        return None
    return resolve(model.model)


def open_text(model: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template, from the model's directory or the one given."""
    from cellar.models.hub import resolve

    if model.skip_tokenizer_init:
        return None, None
    directory = resolve(model.tokenizer) if model.tokenizer is not None else checkpoint
    if directory is None:
        raise ConfigError(
            f"model {model.model} is a config without a tokenizer; set skip_tokenizer_init, or give a tokenizer."
        )
    tokenizer = Tokenizer.load(directory)
    return tokenizer, ChatTemplate.load(directory, tokenizer.special_tokens)
