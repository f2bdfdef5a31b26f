"""Who predicts an engine's steps: its plan, else the profile of the machine that it runs on."""

from __future__ import annotations

import torch

from cellar.bench.forecast import Forecast
from cellar.core.errors import CellarError
from cellar.core.hardware import Profile
from cellar.engine.opened import Opened
from cellar.planner.cost import dimensions
from cellar.planner.partition import formats_of
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepCost
from cellar.reports.machines import fitted, open_machine
from cellar.runtime.device import resolve_device
from cellar.runtime.probes.registry import default_path, machine_name, profiles_of


def predict(forecast: Forecast, opened: Opened, profile: Profile | None = None, price: StepCost | None = None) -> None:
    """Let the forecast price an opened engine's steps: by its plan, by `price` (`engine/measured_price.py`), by
    `profile`, or by one of this machine.

    Without any of them it predicts nothing.
    """
    if opened.plan is not None:
        forecast.follow(opened.plan, None if opened.offload is None else opened.offload.channels.seconds)
        return
    if price is not None:
        forecast.cost, forecast.source = price, "rates of this device, measured at the start"
        return
    device = resolve_device(opened.config.device.device)
    for known in (profile,) if profile is not None else _profiles(device):
        try:
            machine = open_machine("", known)
        except CellarError:
            continue  # it knows too little of what a plan needs
        if (machine.device.kind == "cpu") != (device.type == "cpu"):
            continue
        spec, form = opened.spec, formats_of(opened.spec.dtype)
        d = dimensions(spec)
        machine, about = fitted(machine, known, d, opened.config.model.model or "demo", form, spec.dtype)
        forecast.cost, forecast.source = StepPrices(d, machine.with_devices(1), form).cost, about
        return


def _profiles(device: torch.device) -> tuple[Profile, ...]:
    if device.type != "cpu":
        return profiles_of("auto", device)
    own = default_path(machine_name(None))
    return (Profile.load(own),) if own.is_file() else ()
