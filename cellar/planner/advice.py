"""What to say when a model fits nowhere: what is missing, and what would do, tried before it is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.offload import Job
from cellar.planner.partition import INT4, INT4_KV4, INT8, Formats
from cellar.planner.resident import resident_plans
from cellar.planner.streamed import offload_plans

TRIED_COUNTS = 4


def fits(d: Dimensions, machine: Machine, job: Job, formats: Sequence[Formats]) -> bool:
    """Whether the smallest plan of any kind fits."""
    return bool(
        resident_plans(d, machine, job, formats, batches=(1, machine.num_devices))
        or offload_plans(d, machine, job, formats, sizes=(1,), counts=(1,))
    )


def does_not_fit(d: Dimensions, machine: Machine, job: Job, formats: Sequence[Formats]) -> str:
    """One sentence for a search that found nothing."""
    form = min(formats, key=lambda f: f.weight_bytes)
    weights = d.layers * d.layer_elements * form.weight_bytes + (d.head_elements + d.table_elements) * form.table_bytes
    kv = (job.prompt + job.generate) * d.kv_elements() * d.layers * form.kv_bytes
    room = machine.num_devices * machine.usable("device")
    room += machine.num_hosts * (machine.usable("host") + machine.usable("disk"))
    if weights + kv <= room:
        missing = (
            f"{machine.name} has {gib(machine.usable('device'))} a device, but two layers' weights "
            f"({gib(2 * d.layer_elements * form.weight_bytes)}), the tables and one sequence's activations need more"
        )
    else:
        missing = (
            f"the weights ({gib(weights)} in {form.name}) and one sequence's KV ({gib(kv)}) need {gib(weights + kv)}, "
            f"but {machine.name} has {gib(room)} in devices, hosts and disks"
        )
    least = -(-(weights + kv) // (room / machine.num_devices))
    return f"{missing}; {_what_would_do(d, machine, job, formats, int(least))}."


def _what_would_do(d: Dimensions, machine: Machine, job: Job, formats: Sequence[Formats], least: int) -> str:
    for count in _counts(d, max(least, machine.num_devices + 1)):
        if fits(d, machine.with_devices(count), job, formats):
            return f"take {count} such devices"
    stored = any(form.weight_bytes < 2 and not form.quantization for form in formats)  # a quantized checkpoint
    for form in () if stored else (INT8, INT4, INT4_KV4):
        if fits(d, machine, job, (form,)):
            return f"take --formats {form.name}"
    for prompt in (job.prompt // 2, job.prompt // 8):
        if prompt and fits(d, machine, Job(prompt, job.generate), formats):
            return f"take --prompt {prompt}"
    return "take a machine with more memory a device"


def _counts(d: Dimensions, least: int) -> Iterator[int]:
    """Numbers of devices from `least` on that cut the layers or the heads evenly, a few of them."""
    even = (n for n in range(least, 8 * least + 1) if d.layers % n == 0 or d.heads % n == 0)
    for _, n in zip(range(TRIED_COUNTS), even, strict=False):
        yield n


def gib(nbytes: float) -> str:
    """`12.3 GiB`."""
    return f"{nbytes / 2**30:,.1f} GiB"
