"""How many slots a runtime gets: what memory is left beside weights and the buffers of the largest step.

On an accelerator those buffers are not estimated but seen: the largest steps are run once with a cache of one slot,
and what the allocator has taken by then is not given to the cache.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

import numpy as np
import torch

from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import BuffersError, CapacityError
from cellar.core.messages import Emit, RowOpen, Source, Spans, StepPlan, TableUpdate
from cellar.core.sampling import MAX_LOGPROBS, SamplingParams
from cellar.models.loader import LoadedWeights
from cellar.models.model import Model
from cellar.runtime.memory import device_total, device_used, host_available, human
from cellar.runtime.offload.opened import Offloaded
from cellar.runtime.ranks.place import Seat
from cellar.runtime.steps import arena
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.tiers.arena import ArenaChunks

# Everything that takes memory when tokens are chosen, all at once.
_COSTLY = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    seed=0,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
)


def plan_slots(
    model: Model,
    weights: LoadedWeights,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    device: torch.device,
    *,
    enforce_eager: bool = False,
    planned: int | None = None,
    seat: Seat | None = None,
    offloaded: Offloaded | None = None,
    held: int | None = None,
    wide_layers: Collection[int] = (),
) -> int:
    """Slots of the KV cache on `device`, on which the weights lie already; `planned` ones, if that is given.
    `seat`: this rank among others, which do the same now. `offloaded`: where layers come from that do not lie there.
    `held`: bytes that an accelerator may hold in all. `wide_layers`: as the steps to come have them.

    Raises CapacityError if one request of the longest context does not fit.
    """
    spec = model.spec
    if planned is not None and offloaded is not None and offloaded.kv[0] == "host":
        if device.type != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
            rehearse(model, weights, schedule, device, capture=False, seat=seat, offloaded=offloaded)
            taken = int(torch.cuda.memory_reserved(device))
            if held is not None and taken > held:
                raise BuffersError(
                    f"weights and the buffers of the largest step take {human(taken)} of {device}, but device_memory "
                    f"is {human(held)}; raise it, or lower max_num_batched_tokens or max_num_seqs.",
                    taken - held,
                )
        return planned
    if device.type == "cpu":
        free = host_available()
        size = 1 if seat is None else seat.size
        nbytes = arena.cpu_cache_nbytes(cache, free, size) if planned is None else planned * spec.kv.chunk_nbytes()
    else:
        # What nobody can reach any more, perhaps a model of before, would be counted as taken.
        gc.collect()
        torch.cuda.empty_cache()
        graphs = rehearse(
            model,
            weights,
            schedule,
            device,
            capture=not enforce_eager,
            seat=seat,
            offloaded=offloaded,
            wide_layers=wide_layers,
            in_parts=cache.kv_offloading_size is not None,
        )
        used = device_used(device) + graphs
        free = device_total(device) - used
        if held is not None:
            # What this process's allocator has taken, and captured steps will.
            free = min(free, held - int(torch.cuda.memory_reserved(device)) - graphs)
        if planned is not None:
            nbytes = planned * spec.kv.chunk_nbytes()
        elif held is None:
            nbytes = arena.device_cache_nbytes(cache, used, device)
        else:
            nbytes = max(0, free) if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes
    if held is not None and nbytes > free:
        raise BuffersError(
            f"KV is to take {human(nbytes)}, but of its device_memory {device} has {human(max(0, free))} left beside "
            "weights and the buffers of the largest step; raise device_memory, or lower max_num_batched_tokens, "
            "max_num_seqs or kv_cache_memory_bytes.",
            nbytes - free,
        )
    if planned is not None and nbytes > free:
        raise CapacityError(
            f"the plan has {planned:,} chunks of KV ({human(nbytes)}), but beside weights and buffers {device} has "
            f"{human(free)} free; plan for this machine (`cellar profile`, `cellar plan --machine FILE`)."
        )
    option = "the plan's chunks of KV" if planned is not None else arena.what_decides(cache, device)
    return arena.num_slots(spec.kv, nbytes, spec.max_position, option)


def rehearse(
    model: Model,
    weights: LoadedWeights,
    schedule: ScheduleConfig,
    device: torch.device,
    *,
    capture: bool,
    seat: Seat | None = None,
    offloaded: Offloaded | None = None,
    wide_layers: Collection[int] = (),
    in_parts: bool = False,
) -> int:
    """Run the largest steps that the schedule allows: many requests at once, and one long prompt.

    `in_parts`: chunks come from the host's memory in parts, for each of which captured prompts can wait.
    Returns the bytes that captured steps take, which are given back; what the largest steps took stays taken.
    Raises CapacityError if the device has too little memory for them.
    """
    tokens, rows = schedule.max_num_batched_tokens, schedule.max_num_seqs
    assert tokens is not None, "decided by EngineConfig.on"
    homes = 1 if seat is None or seat.laid is None else seat.laid.layouts.homes
    longest = model.spec.max_position
    host_kv = None if offloaded is None else offloaded.host_kv(model.spec.kv, 1, device)
    executor = StepExecutor(
        model,
        weights,
        num_slots=1,
        num_rows=-(-rows // homes) * homes,
        device=device,
        layers=None if offloaded is None else offloaded.layers,
        batch=None if offloaded is None else offloaded.batch,
        seat=seat,
        host_kv=host_kv,
        jobs=None if offloaded is None else offloaded.jobs,
    )
    executor.forward.keep_maximum(wide_layers)
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            graphs = 0
            if capture:
                parts = ArenaChunks(executor.arena, device).part_of_layer if in_parts else ()
                executor.capture(rows, tokens, parts=parts)
                torch.cuda.empty_cache()
                taken, reserved = device_used(device), torch.cuda.memory_reserved(device)
                missing = executor.missing()
                executor.release()
                torch.cuda.empty_cache()
                # What stays are kernels and workspaces, which the second capture finds.
                graphs = taken - device_used(device)
                driver = graphs - (reserved - torch.cuda.memory_reserved(device))
                graphs += missing.nbytes(max(0, driver))
            for step, lengths in enumerate((_shares(tokens, rows, longest), [min(tokens, longest)])):
                executor.launch(_rehearsal(step, lengths, model.spec.kv.chunk_size), MaskBox())()
            if host_kv is not None:
                torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has too little memory for steps of {tokens} tokens beside the weights; lower "
            "max_num_batched_tokens or max_num_seqs."
        ) from error
    finally:
        if host_kv is not None:
            host_kv.close()
    return graphs


def _shares(tokens: int, rows: int, longest: int) -> list[int]:
    """`tokens` dealt out to as many requests as may run, at most `longest` each."""
    rows = min(rows, tokens)
    return [min(longest, tokens // rows + (r < tokens % rows)) for r in range(rows)]


def _rehearsal(step: int, lengths: list[int], chunk_size: int) -> StepPlan:
    """Prompts of these lengths, all in slot 0 (nobody looks at the results); all sampled, the first one scored."""
    count = len(lengths)
    columns = [-(-length // chunk_size) for length in lengths]
    total = sum(columns)
    rows = np.arange(count, dtype=np.int32)
    column = np.concatenate([np.arange(n, dtype=np.int32) for n in columns])
    emit = np.full(count, Emit.LAST, np.int32)
    emit[0] = Emit.ALL
    targets = np.zeros(lengths[0], np.int32)
    targets[-1] = -1
    none = np.zeros(1, np.int32)
    return StepPlan(
        step=step,
        spans=Spans(
            row=rows,
            start=np.zeros(count, np.int32),
            stop=np.array(lengths, np.int32),
            source=np.full(count, Source.HOST, np.int32),
            emit=emit,
        ),
        tokens=np.zeros(sum(lengths), np.int32),
        table=TableUpdate(rows.repeat(columns), column, np.zeros(total, np.int32)),
        opens=tuple(RowOpen(row, _COSTLY, prompt=none, output=none) for row in range(count)),
        closes=tuple(range(count)),
        targets=targets,
    )
