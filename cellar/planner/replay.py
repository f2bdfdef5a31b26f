"""A plan's memory, replayed allocation by allocation over a whole block: what every tier holds at its fullest."""

from __future__ import annotations

from dataclasses import dataclass, field

from cellar.planner.integer import IntegerPlan, row_classes
from cellar.planner.offload import TIERS, logits_bytes, working_bytes


@dataclass
class Tier:
    """Bytes held under a name each, and the most there ever were."""

    held: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    peak: float = 0.0

    def put(self, name: str, nbytes: float) -> None:
        """Allocate, or change an allocation's size."""
        self.now += nbytes - self.held.get(name, 0.0)
        self.held[name] = nbytes
        self.peak = max(self.peak, self.now)

    def free(self, name: str) -> None:
        """Give an allocation back."""
        self.now -= self.held.pop(name, 0.0)


def replay(found: IntegerPlan) -> dict[str, float]:
    """Peak bytes per tier of this device's slice, block schedule as in figure 4 of 002.

    Home allocations first (rows of weights, activations of the prompt, in the tier that the counts say); then, token by
    token, layer by layer and batch by batch, the buffers for what is loaded, the working set, and the KV as it grows.
    With the diagonal schedule the sequences' lengths are spread evenly over s + 1 .. s + n - 1 from the start.
    """
    p = found.plan.problem
    d, job, block, part = p.d, p.job, p.block, p.part
    s, n, gbs, bls = job.prompt, job.generate, block.gbs, block.bls
    tiers = {name: Tier() for name in TIERS}
    device, host = tiers["device"], tiers["host"]
    device.put("tables", (d.head_elements + d.table_elements) * 2.0 / part.cut)
    away = on_disk = 0.0
    for c in row_classes(d, block.formats.weight_bytes, part.cut * part.gathered):
        for i, name in enumerate(TIERS):
            rows = found.rows[c.name][i]
            for j in range(part.layers):
                tiers[name].put(f"{c.name}.{j}", rows * c.row_bytes)
            away += rows * c.row_bytes if i > 0 else 0.0
            on_disk += rows * c.row_bytes if i == 2 else 0.0
    layer = d.layer_elements * block.formats.weight_bytes / part.cut / part.gathered
    hidden = 2.0 * d.embed * s
    for i, name in enumerate(TIERS):
        tiers[name].put("hidden", found.hidden[i] * hidden)
    pair = 2.0 * d.head_dim * block.formats.kv_bytes * part.layers * max(d.kv_heads / part.cut, 1.0)
    pair /= max(d.kv_heads // part.cut, 1)
    pairs = {"device": found.kv["kv.device"], "host": 0, "disk": 0}
    for tier in ("host", "disk"):
        pairs[tier] = found.kv[f"kv.{tier}.cpu"] + found.kv[f"kv.{tier}.device"]
    fetched = found.kv["kv.host.device"] + found.kv["kv.disk.device"]
    total = sum(pairs.values())
    per_sequence = total / bls

    def batch_kv(share: float, tokens: int) -> float:
        """K and V of one GPU batch in one layer, of a share of its pairs."""
        return share * gbs * per_sequence * tokens * pair / part.layers

    for i in range(n):
        # The i-th token attends to s + i; a diagonal block holds sequences of all ages at all times.
        length = s + i + 1 if block.schedule == "zigzag" else (2 * s + n) * (n - 1) / (2 * n)
        new = s if i == 0 else 1
        for j in range(part.layers):
            device.put(f"weights of {j % 2}", away + layer * (part.gathered - 1))
            host.put(f"weights of {j % 2} from disk", on_disk)
            for k in range(block.batches):
                side = k % 2
                device.put(f"hidden {side}", 2.0 * d.embed * new * gbs * (found.hidden[1] + found.hidden[2]) / bls)
                host.put(f"hidden {side} of disk", 2.0 * d.embed * new * gbs * found.hidden[2] / bls)
                device.put(f"cache {side}", batch_kv(fetched / total, s + i))
                host.put(f"cache {side} of disk", batch_kv(pairs["disk"] / total, s + i))
                device.put("working", working_bytes(d, gbs * new, part.cut))
                device.put(f"new cache {side}", batch_kv(1 - pairs["device"] / total, new))
                device.free("working")
                if j == part.layers - 1:
                    device.put("logits", logits_bytes(d, gbs, part.cut))
                    device.free("logits")
            if j == 0:
                for name in TIERS:
                    tiers[name].put("kv", pairs[name] * length * pair)
    return {name: tier.peak for name, tier in tiers.items()}
