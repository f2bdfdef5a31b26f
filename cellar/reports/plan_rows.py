"""A plan in words and rows, as a person reads it."""

from __future__ import annotations

from dataclasses import fields, replace

from cellar.core.hardware import Measure
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.partition import Choice, kv_bytes_per_chip, padded_heads
from cellar.planner.plans import Plan
from cellar.planner.resident import repeated_bytes, resident_bytes
from cellar.planner.traffic import StepSizes, step_traffic

GIB = 2.0**30
ACTIVATION_BYTES = 2


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def prediction(plan: Plan) -> list[tuple[str, str]]:
    """Labels and values of the prediction."""
    rows = [
        (
            "throughput",
            f"{plan.tokens_per_second:,.4g} generated tok/s, {plan.batch * plan.replicas:,} sequences at once",
        ),
        (
            "latency",
            f"{_seconds(plan.latency)} s: prefill {_seconds(plan.prefill_seconds)} s, "
            f"then {_seconds(plan.step_seconds)} s a token",
        ),
        ("lower bound", f"{_seconds(plan.bound)} s: {100 * plan.bound / plan.latency:.0f} % of the estimate"),
        ("MFU", f"{100 * plan.utilization:.1f} %"),
    ]
    if plan.dollars_per_million:
        source = plan.machine.price.source if plan.machine.price else ""
        rows.append(("cost", f"{plan.dollars_per_million:,.3g} dollars per million tokens (price {source})"))
    rows.append(("binds", plan.binds))
    return rows


def where(plan: Plan) -> list[tuple[str, str]]:
    """What lies where, per device; and how the model is split."""
    rows = [("split", _split(plan))]
    if plan.offload is not None:
        found = plan.offload
        part = found.problem.part
        for tensor in ("weights", "kv", "hidden"):
            shares = []
            for tier in ("device", "host", "disk"):
                share = sum(found.share(name) for name in _names(tensor, tier))
                if share > 5e-4:
                    shares.append(f"{100 * share:.1f} % {tier}")
            rows.append(({"hidden": "activations", "kv": "KV"}.get(tensor, tensor), ", ".join(shares)))
        on_cpu = found.share("kv.host.cpu") + found.share("kv.disk.cpu")
        if on_cpu > 5e-4:
            rows.append(("attention", f"{100 * on_cpu:.1f} % on the CPU, where its KV lies"))
        block = found.block
        rows.append(("block", f"{block.batches} batches of {block.gbs} sequences, {block.schedule}"))
        used = ", ".join(f"{v / GIB:,.1f} GiB {tier}" for tier, v in found.used().items() if v)
        rows.append(("memory", used + (f" (of {part.sharers} that share the host)" if part.sharers > 1 else "")))
        return rows
    assert plan.decode is not None
    assert plan.prefill is not None
    padded = padded_heads(plan.d, plan.tensor)
    assert padded is not None
    weights = resident_bytes(padded, plan.formats, plan.tensor, plan.stages)
    weights += repeated_bytes(padded, plan.formats, plan.decode.layout)
    context = plan.job.prompt + plan.job.generate
    kv = kv_bytes_per_chip(padded, plan.decode.layout, plan.batch, context, plan.formats) / plan.stages
    rows.append(("weights", f"{weights / GIB:,.1f} GiB on each device, {plan.formats.name}"))
    rows.append(("KV", f"{kv / GIB:,.1f} GiB on each device"))
    if plan.tensor > 1:
        mesh = plan.decode.layout.mesh
        rows.append(("mesh", f"{mesh.x} x {mesh.y} x {mesh.z}"))
        chunks = ", sent in chunks beside the products" if plan.prefill.looped else ""
        rows.append(("prefill", _layout_words(plan.prefill.name) + chunks))
        rows.append(("decode", _layout_words(plan.decode.name)))
        rows.append(("sent for the prompts", _sent(plan, padded, plan.prefill, plan.job.prompt)))
        rows.append(("sent for a token of each", _sent(plan, padded, plan.decode, 1)))
    return rows


def _sent(plan: Plan, padded: Dimensions, choice: Choice, new: int) -> str:
    """Bytes of collectives on each device in a step of the whole batch: the layout's, and the algorithms'."""
    step = StepSizes(plan.batch, new, ACTIVATION_BYTES, plan.formats.weight_bytes)
    parts = step_traffic(replace(padded, layers=padded.layers // plan.stages), choice.layout, step)
    logical, moved = sum(part.logical for part in parts), sum(part.moved for part in parts)
    return f"{logical / 2**20:,.4g} MiB a device ({moved / 2**20:,.4g} by our sums in order)"


def _names(tensor: str, tier: str) -> list[str]:
    if tensor == "kv" and tier != "device":
        return [f"kv.{tier}.cpu", f"kv.{tier}.device"]
    return [f"{tensor}.{tier}"]


def _split(plan: Plan) -> str:
    parts = [f"{plan.tensor} device{'s' if plan.tensor > 1 else ''} a stage"]
    if plan.offload is not None and plan.offload.problem.part.gathered > 1:
        parts = [f"{plan.tensor} devices, each streaming its shard and gathering the others'"]
    parts.append(f"{plan.stages} stage{'s' if plan.stages > 1 else ''}")
    if plan.replicas > 1:
        parts.append(f"{plan.replicas} copies")
    return ", ".join(parts)


_LAYOUTS = {
    "1D": "1D weight-stationary",
    "2D": "2D weight-stationary",
    "X": "weights gathered over x",
    "XY": "weights gathered over x and y",
    "XYZ": "weights gathered over all devices",
}
_ATTENTION = {"heads": "attention by heads", "batch": "attention by batch", "mixed": "attention by KV heads and batch"}


def _layout_words(name: str) -> str:
    layout, attention = name.split()
    return f"{_LAYOUTS[layout]}, {_ATTENTION[attention]}"


def busy(plan: Plan) -> list[tuple[str, float, float]]:
    """Channel, busy seconds, and percent of the latency, busiest first."""
    return sorted(((n, s, 100 * s / plan.latency) for n, s in plan.busy if s > 0), key=lambda row: -row[1])


def origins(machine: Machine) -> list[tuple[str, str, str]]:
    """Every number of a machine that a price rests on: name, value with unit, origin."""
    found: list[tuple[str, Measure]] = [
        ("device memory", machine.device.capacity),
        ("device memory rate", machine.device.bandwidth),
        *((f"peak {name}", rate) for name, rate in machine.device.flops.items()),
        ("host memory", machine.host.capacity),
        ("host memory rate", machine.host.bandwidth),
        ("host to device", machine.to_device.bandwidth),
        ("device to host", machine.to_host.bandwidth),
    ]
    if machine.disk and machine.disk_write:
        found += [("disk", machine.disk.capacity), ("disk read", machine.disk.bandwidth)]
        found.append(("disk write", machine.disk_write))
    for net in machine.networks:
        if net.measured is None:
            found += [(net.name, net.bandwidth), (f"{net.name} hop", net.hop)]
            continue
        for fit in net.measured.fits:
            for k, line in enumerate(fit.lines):
                name = f"{fit.kind} of {fit.ranks}" + (", large" if k else "")
                found.append((f"{name}, latency", Measure(line.start, "s", fit.source)))
                found.append((f"{name}, rate", Measure(line.rate, "bytes/s", fit.source)))
    found += [(f.name.replace("_", " "), getattr(machine.constants, f.name)) for f in fields(machine.constants)]
    found += [(f"ranks' {f.name.replace('_', ' ')}", getattr(machine.ranks, f.name)) for f in fields(machine.ranks)]
    if machine.price:
        found.append(("price of a device", machine.price))
    return [(name, f"{m.value:.4g} {m.unit}", m.source) for name, m in found]
