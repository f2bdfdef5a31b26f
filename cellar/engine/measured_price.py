"""What steps of a model in fewer bits take on an accelerator that holds it: by its own rates, measured."""

from __future__ import annotations

from dataclasses import replace

from cellar.core.config import EngineConfig
from cellar.engine.opened import checkpoint_of
from cellar.engine.own_plan import model_of, rates_of_device
from cellar.planner.machines import H200_LAYER
from cellar.planner.moves import Away
from cellar.planner.passes import pass_cost
from cellar.planner.work import FEW_TOKENS, StepCost


def measured_price(config: EngineConfig) -> StepCost | None:
    """The price, measured now, in some tenths of a second; what a layer's kernels take to start and end is an H200's.

    None where profiles know better, or nobody can say: of models as they are, on a processor, on several devices, and
    where there is no memory to measure in, as beside an engine that is open.
    """
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import is_out_of_memory
    from cellar.runtime.offload.device_rates import device_rates

    device = resolve_device(config.device.device)
    if device.type == "cpu" or config.device.num_ranks > 1:
        return None
    _, _, spec = model_of(config, checkpoint_of(config.model), device.type)
    kept_plain = all(group.dtype == spec.dtype for group in spec.kv.groups)
    if kept_plain and not any(tensor.formats for layer in spec.layers for tensor in layer.tensors):
        return None
    tokens = config.on(device.type).schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"
    try:
        found = device_rates(spec, device, FEW_TOKENS, tokens)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
    cost = pass_cost(spec, rates_of_device(*found), Away(0, 0, "device", "gpu"))
    return replace(cost, launches=H200_LAYER * len(spec.layers))
