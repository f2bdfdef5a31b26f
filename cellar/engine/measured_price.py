"""What steps of a model in fewer bits take on an accelerator that holds it: by its own rates, measured."""

from __future__ import annotations

from cellar.core.config import EngineConfig
from cellar.engine.opened import checkpoint_of
from cellar.engine.own_plan import model_of, rates_of_device
from cellar.planner.passes import Away, pass_cost
from cellar.planner.work import FEW_TOKENS, StepCost


def measured_price(config: EngineConfig) -> StepCost | None:
    """The price, measured now, in some tenths of a second; an engine that is open may have left no memory for it.

    None where profiles know better, or nobody can say: of models as they are, on a processor, on several devices.
    """
    from cellar.runtime.device import resolve_device
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
    rates = rates_of_device(*device_rates(spec, device, FEW_TOKENS, tokens))
    return pass_cost(spec, rates, Away(0, 0, "device", "gpu"))
