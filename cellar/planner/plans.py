"""A plan: one way to run a job on a machine, with its price; and the ways that there are to split devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cellar.core.layouts import Layouts
from cellar.planner.cost import Dimensions, flops_utilization, product_flops
from cellar.planner.linear import OffloadPlan
from cellar.planner.machines import Machine
from cellar.planner.offload import Job
from cellar.planner.partition import Choice, Formats, padded_heads


@dataclass(frozen=True)
class Plan:
    """One way to run a job. `batch` sequences per copy are in flight; seconds are of one whole batch.

    `kind` is `resident` (one device), `partition` or `offload`. `bound` is what no plan on these rates could beat.
    """

    kind: Literal["resident", "partition", "offload"]
    machine: Machine
    d: Dimensions
    job: Job
    formats: Formats
    tensor: int
    stages: int
    replicas: int
    batch: int
    prefill_seconds: float
    decode_seconds: float
    bound: float
    busy: tuple[tuple[str, float], ...]
    prefill: Choice | None = None
    decode: Choice | None = None
    offload: OffloadPlan | None = None
    micro_batches: int = 1

    @property
    def latency(self) -> float:
        """Seconds from the first prompt token to the last generated one."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds between two tokens of a sequence."""
        return self.decode_seconds / max(self.job.generate - 1, 1)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all copies."""
        return self.replicas * self.batch * self.job.generate / self.latency

    @property
    def dollars_per_million(self) -> float:
        """Dollars for a million generated tokens; 0 if the machine has no price."""
        price = self.machine.price.value if self.machine.price else 0.0
        return price * self.machine.num_devices / 3600 / self.tokens_per_second * 1e6

    @property
    def utilization(self) -> float:
        """MFU over prefill and decode: of the products that are needed. The last token generated is not computed on."""
        sequences = self.replicas * self.batch
        tokens = sequences * (self.job.prompt + self.job.generate - 1)
        flops = product_flops(self.d, tokens, sequences * self.job.generate)
        # A share fitted to measured steps may pass 1; what is reached then is the peak.
        peak = self.machine.flops(self.formats.compute) * max(1.0, self.machine.constants.matmul.value)
        return flops_utilization(flops, self.latency, self.machine.num_devices, peak)

    @property
    def binds(self) -> str:
        """The channel with the most busy seconds."""
        return max(self.busy, key=lambda pair: pair[1])[0]

    @property
    def stages_run(self) -> bool:
        """Whether an engine runs its stages as they are priced: one alone, or of one device each, on a processor."""
        return self.stages == 1 or (self.tensor == 1 and self.machine.device.kind == "cpu")

    @property
    def obstacle(self) -> str:
        """Why no engine runs it, as the end of a sentence; empty if one does."""
        if self.offload is not None:
            return "an engine streams weights only as it plans itself (--device-memory)"
        split = {"replicas": self.replicas, "tensor-parallel-size": self.tensor, "pipeline-parallel-size": self.stages}
        how = " ".join(["serve", *(f"--{name} {count}" for name, count in split.items() if count > 1)])
        if not self.stages_run:
            why = "a plan's have one device each"
            if self.tensor == 1:
                why = "steps of stages are not captured, which its price leaves out"
            return f"it has {self.stages} pipeline stages, and {why} ({how})"
        if self.replicas > 1:
            return f"it is {self.replicas} copies, and a plan is of one engine ({how})"
        if self.prefill is None or self.decode is None or self.tensor == 1:
            return ""
        padded = padded_heads(self.d, self.tensor)
        assert padded is not None, "its layouts have a price"
        if Layouts(self.prefill.layout, self.decode.layout).moves(padded.kv_heads):
            return f"K and V would move between {self.prefill.name} for prompts and {self.decode.name} for decodes"
        return ""

    def figures(self) -> dict[str, Any]:
        """What the plan promises, in seconds, tokens and dollars."""
        return {
            "plan": self.name,
            "machine": self.machine.name,
            "batch": self.batch * self.replicas,
            "latency_seconds": self.latency,
            "prefill_seconds": self.prefill_seconds,
            "seconds_per_token": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "dollars_per_million_tokens": self.dollars_per_million,
            "utilization": self.utilization,
            "lower_bound_seconds": self.bound,
            "binds": self.binds,
            "busy_seconds": dict(self.busy),
        }

    @property
    def name(self) -> str:
        """A short name: `8 x 1, XYZ batch then 2D batch, bf16, batch 64`."""
        split = f"{self.tensor} x {self.stages}" + (f" x {self.replicas} copies" if self.replicas > 1 else "")
        if self.offload is not None:
            block = self.offload.block
            how = f"offloaded, {block.gbs} x {block.batches} {block.schedule}"
        elif self.prefill is not None and self.decode is not None and self.tensor > 1:
            how = f"{self.prefill.name} then {self.decode.name}"
        else:
            how = "on the device"
        return f"{split}, {how}, {self.formats.name}, batch {self.batch}"


def ways(devices: int, layers: int) -> list[tuple[int, int, int]]:
    """(devices per stage, stages, copies) with all devices at work; stages have equal numbers of layers."""
    found = []
    for t in range(1, devices + 1):
        for p in range(1, devices // t + 1):
            if devices % (t * p) == 0 and layers % p == 0:
                found.append((t, p, devices // (t * p)))
    return found
