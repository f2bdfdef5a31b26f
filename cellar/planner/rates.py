"""Rates of the ways of a model whose weights are streamed, and those of machines that are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cellar.core.specs import ModelSpec
from cellar.planner.machines import Machine


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes/s while all go on at once: over the link to the device, of products and of attention by the CPU, of the
    device's memory, of the disk; and the FLOP/s of the device's products of many tokens, and of few (`FEW_TOKENS`; 0:
    nobody has measured them). `device_attention`: of what its attention of decodes reads of the cache (0: likewise, and
    taken for `device`). `copies`: of what its kernels between products read and write (0: that is in `flops`).
    `few_multiply`: of the CPU's products of `few_measured` tokens (0: likewise, and taken for `multiply`).
    `exchange`: seconds in which an x comes to the CPU and its product goes back, beside the product. `reads`: over the
    link by kernels that attend to KV in host memory; 0: they attend to none of it. `runs_ahead`: launches go on while
    the CPU computes for the device; if not, the CPU waits for them. `units`: its matrix units multiply the model's
    rows. `idle`: how many times as fast the link is, or a processor's disk, while the CPU has nothing to do.

    Those of an H200 (products of prompts of 4,096 tokens and more, docs/log/offload.md), its 16 cores and a solid-state
    disk. `multiply` 0: no rows are left to the CPU.
    """

    link: float = 50e9
    multiply: float = 0.0
    attention: float = 60e9
    device: float = 4e12
    disk: float = 2e9
    flops: float = 6.2e14
    few_flops: float = 0.0
    device_attention: float = 0.0
    copies: float = 0.0
    few_multiply: float = 0.0
    few_measured: int = 0
    exchange: float = 5e-5
    reads: float = 0.0
    runs_ahead: bool = True
    units: bool = False
    idle: float = 1.0

    def shared(self, ranks: int, kind: str = "cpu") -> Rates:
        """Those of each of so many ranks on one processor, which read its memory and its disk at once. On a CPU
        products of many tokens are of the rank's own cores, with which they were measured; a GPU (`kind`) has memory
        and a link of its own, measured while the others' were at work.
        """
        names = ("multiply", "few_multiply", "attention", "disk", *(("link", "device") if kind == "cpu" else ()))
        found: dict[str, Any] = {name: getattr(self, name) / ranks for name in names}
        return replace(self, **found)


def processor_rates(machine: Machine, dtype: str) -> Rates:
    """Those of a processor by its profile. Nothing crosses a link."""
    constants, memory = machine.constants, machine.host.bandwidth.value
    disk = Rates().disk if machine.disk is None else machine.disk.bandwidth.value
    return Rates(
        attention=memory * constants.attention_hbm.value,
        device=memory * constants.hbm.value,
        flops=machine.flops(dtype) * constants.matmul.value,
        disk=disk,
    )


QUANTIZED_RATES = {"int4": 2.0e12, "mxfp4": 1.9e12, "int8": 3.7e12, "fp8": 3.7e12}
"""Bytes/s of products of one token in a format on an H200, whose memory is not what binds them
(docs/performance/h200-quantized.md, 28672 x 4096).
"""


def in_formats(rates: Rates, spec: ModelSpec) -> Rates:
    """Rates of an accelerator for the formats of a model's layers: the slowest of them is that of its memory."""
    formats = {format.name for layer in spec.layers for tensor in layer.tensors for format in tensor.formats}
    found = [QUANTIZED_RATES[name] for name in formats if name in QUANTIZED_RATES]
    return replace(rates, device=min([rates.device, *found]))
