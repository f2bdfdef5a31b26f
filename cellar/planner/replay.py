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
    """Peak bytes per tier of this device's slice, block schedule as in FlexGen's figure 4.

    Home allocations first (rows of weights, activations of the prompt, in the tier that the counts say); then, token by
    token, layer by layer and batch by batch, the buffers for what is loaded, the working set, and the KV as it grows.
    With the diagonal schedule the sequences' lengths are spread evenly over s + 1 .. s + n - 1 from the start.
    """
    p = found.plan.problem
    d, job, block, part = p.d, p.job, p.block, p.part
    s, n, gbs, bls = job.prompt, job.generate, block.gbs, block.bls
    tiers = {name: Tier() for name in TIERS}
    device, host = tiers["device"], tiers["host"]
    device.put("tables", (d.head_elements + d.table_elements) * block.formats.table_bytes / part.cut)
    away = on_disk = 0.0
    for c in row_classes(d, block.formats.weight_bytes, part.cut, part.gathered):
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
    # A chunk's bytes for each token that its sequence has; whole when that is s + n.
    per_token = 2.0 * d.head_dim * block.formats.kv_bytes * part.layers * max(d.kv_heads / part.cut, 1.0)
    chunk = per_token * d.chunk / (s + n)
    chunks = {"device": found.kv["kv.device"], "host": 0, "disk": 0}
    for tier in ("host", "disk"):
        chunks[tier] = found.kv[f"kv.{tier}.cpu"] + found.kv[f"kv.{tier}.device"]
    fetched = found.kv["kv.host.device"] + found.kv["kv.disk.device"]
    total = sum(chunks.values())
    per_sequence = total / bls

    def batch_kv(share: float, tokens: int) -> float:
        """K and V of one GPU batch in one layer, of a share of its chunks."""
        return share * gbs * per_sequence * tokens * chunk / part.layers

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
                host.put(f"cache {side} of disk", batch_kv(chunks["disk"] / total, s + i))
                device.put("working", working_bytes(d, gbs * new, part.cut))
                fresh = (1 - chunks["device"] / total) * gbs * new * per_token / part.layers
                device.put(f"new cache {side}", fresh)
                device.free("working")
                if j == part.layers - 1:
                    device.put("logits", logits_bytes(d, gbs, part.cut))
                    device.free("logits")
            if j == 0:
                for name in TIERS:
                    tiers[name].put("kv", chunks[name] * length * chunk)
    return {name: tier.peak for name, tier in tiers.items()}
