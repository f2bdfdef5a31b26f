"""Machines by name or by the profile that was measured, and what a profile knows of a model's steps."""

from __future__ import annotations

from pathlib import Path

from cellar.core.hardware import Profile
from cellar.planner.calibration import fit_steps, read_steps, table_name
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine, from_profile, machine, processor
from cellar.planner.partition import Formats


def open_profile(name: str) -> Profile | None:
    """The profile that a name is the file of; None if it is a machine's name."""
    return Profile.load(Path(name)) if name.endswith(".json") or Path(name).is_file() else None


def open_machine(name: str, profile: Profile | None = None) -> Machine:
    """A machine by name, or of a profile: its accelerator, else its processor."""
    profile = open_profile(name) if profile is None else profile
    if profile is None:
        return machine(name)
    return processor(profile) if profile.device("gpu") is None else from_profile(profile)


def fast_bfloat16(profile: Profile | None) -> bool | None:
    """Whether the profile's processor multiplies bfloat16 in hardware: faster than float32. None if nobody knows."""
    cpu = profile.device("cpu") if profile is not None else None
    if cpu is None or "float32" not in cpu.flops:
        return None
    return "bfloat16" in cpu.flops and cpu.flops["bfloat16"].value > cpu.flops["float32"].value


def fitted(
    found: Machine, profile: Profile | None, d: Dimensions, model: str, form: Formats, dtype: str
) -> tuple[Machine, str]:
    """The machine with constants fitted to the model's measured steps, if its profile has some; and what that is."""
    if profile is None:
        return found, "rates of the machine library"
    table = profile.tables.get(table_name(model, dtype))
    if table is None:
        return found, f"profile of {found.name}, which has no measured steps of this model"
    return fit_steps(d, found, form, read_steps(table)), (
        f"profile of {found.name}, fitted to {len(table.rows)} measured steps"
    )
