"""Machines as data: devices, hosts, disks, links and networks, with the origin of every number.

Origins: `datasheet` is the maker's, `measured` was read off a run (the comment says whose), `fitted` was chosen so that
the model reproduces published times (the comment says which), `assumed` is a guess that a profile should replace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from cellar.core.collectives import SEND, SUM, TABLE
from cellar.core.errors import ConfigError
from cellar.core.hardware import Device, Link, Measure, Origin, Profile
from cellar.planner.collectives import Collectives, ours
from cellar.planner.ranks import NVLINK, NVLINK_RANKS, UNKNOWN, RankConstants
from cellar.planner.sharding import Kind

GIB = 2.0**30
GB = 1e9


def _bytes(value: float, source: Origin) -> Measure:
    return Measure(value, "bytes", source)


def _rate(value: float, source: Origin) -> Measure:
    return Measure(value, "bytes/s", source)


def _seconds(value: float, source: Origin) -> Measure:
    return Measure(value, "s", source)


def _share(value: float, source: Origin) -> Measure:
    return Measure(value, "share", source)


def _flops(value: float, source: Origin, *dtypes: str) -> dict[str, Measure]:
    return {name: Measure(value, "FLOP/s", source) for name in dtypes}


@dataclass(frozen=True, slots=True)
class Network:
    """One tier that joins `size` devices of one unit. `bandwidth` is per device and direction.

    A collective over k devices takes (k - 1) hops of `hop` seconds on a ring or torus axis, one on a switch. A box of
    fewer than `closes` devices is a torus that was cut open: its rings are lines, which go one way at a time.
    `measured`: what collectives took on this very machine, or one of its kind; then these are prices, and rate and hop
    only say it shortly.
    """

    name: str
    size: int
    bandwidth: Measure
    hop: Measure
    topology: Literal["torus", "switch"] = "switch"
    closes: int = 1
    measured: Collectives | None = None

    def rate(self, devices: int) -> float:
        """Bytes/s of each device in a box of so many."""
        return self.bandwidth.value * (1.0 if devices >= self.closes else 0.5)

    def sending(self, nbytes: float, share: float) -> float:
        """Seconds in which a device hands so many bytes to another, at a `share` of the rate."""
        if self.measured is not None:
            return self.measured.of(SEND, 2).seconds(nbytes)
        return nbytes / (self.bandwidth.value * share) + self.hop.value

    def summing(self, nbytes: float, share: float, devices: int) -> float:
        """Seconds of a sum of tensor parallelism over so many devices of which each sends so many bytes."""
        if self.measured is not None:
            return self.measured.of(SUM, devices).seconds(nbytes)
        return nbytes / (self.bandwidth.value * share) + 2 * self.hop.value


@dataclass(frozen=True, slots=True)
class Constants:
    """What turns peak rates into times. All are shares of a peak unless they say seconds or bytes/s.

    `attention_*` are what attention over a cache reaches of the two peaks that products reach `matmul` and `hbm` of.
    Of a product's compute and memory the longer hides `product_overlap` of the shorter.
    `step_seconds` pass once in each step, whatever its size. A step with prompts is launched kernel by kernel, which
    takes the host `eager_seconds` a layer: the step lasts at least that long. `unpack_seconds` pass for each number of
    weights and KV in fewer than 16 bits that the device unpacks before it computes; 0: kernels unpack as they read.
    """

    matmul: Measure
    hbm: Measure
    attention_matmul: Measure
    attention_hbm: Measure
    network: Measure
    product_overlap: Measure
    layer_seconds: Measure
    step_seconds: Measure
    eager_seconds: Measure
    overlap: Measure
    host_attention: Measure
    device_usable: Measure
    host_usable: Measure
    read_cached: Measure
    write_cached: Measure
    disk_op_seconds: Measure
    unpack_seconds: Measure


@dataclass(frozen=True, slots=True)
class Machine:
    """`num_devices` equal devices, `per_host` of them to a host, which share the host's memory and disk.

    `to_device` and `to_host` belong to each device alone. `networks` join devices, innermost first; `ranks`: what
    engines over several devices do beside products. `price` is dollars per device and hour.
    """

    name: str
    device: Device
    num_devices: int
    per_host: int
    host: Device
    to_device: Link
    to_host: Link
    constants: Constants
    disk: Device | None = None
    disk_write: Measure | None = None
    networks: tuple[Network, ...] = ()
    ranks: RankConstants = UNKNOWN
    price: Measure | None = None

    @property
    def num_hosts(self) -> int:
        """Hosts, the last one perhaps not full."""
        return -(-self.num_devices // self.per_host)

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of one device; a dtype that the device does not name runs at its best 16-bit rate."""
        known = self.device.flops
        found = known.get(dtype) or known.get("bfloat16") or known.get("float16") or next(iter(known.values()))
        return found.value

    def with_devices(self, count: int) -> Machine:
        """The same machine with another number of devices."""
        if count < 1:
            raise ConfigError(f"a machine needs at least 1 device, not {count}.")
        return replace(self, name=f"{count}x{self.name}" if count > 1 else self.name, num_devices=count)

    def limited(self, sizes: Mapping[str, int | None]) -> Machine:
        """The same machine with so many bytes of `device`, `host` and `disk` at most; None: as many as it has."""

        def at_most(there: Device, place: str) -> Device:
            most = sizes.get(place)
            if most is None or most >= there.capacity.value:
                return there
            return replace(there, capacity=replace(there.capacity, value=float(most), source="assumed"))

        disk = self.disk and at_most(self.disk, "disk")
        return replace(self, device=at_most(self.device, "device"), host=at_most(self.host, "host"), disk=disk)

    def usable(self, tier: str) -> float:
        """Bytes of one device, one host or one host's disk that a plan may fill."""
        match tier:
            case "device":
                return self.device.capacity.value * self.constants.device_usable.value
            case "host":
                return self.host.capacity.value * self.constants.host_usable.value
            case _:
                return self.disk.capacity.value if self.disk else 0.0


# Fitted to the steps of Llama-3-8B on an H200 and judged on those of Llama-2-7B, within 6 % of all of them
# (docs/performance/h200-llama-3-8b.md; `calibration.fit_kernels`; a test repeats both).
H200_MATMUL, H200_ATTENTION_MATMUL, H200_ATTENTION_HBM = 0.735, 0.342, 0.819
H200_OVERLAP, H200_LAYER, H200_EAGER = 0.555, 1.55e-5, 2.125e-4

# What our kernels reach on an H200, assumed for others of its kind; NCCL reaches 0.75 of NVLink's rate.
_GPU = Constants(
    matmul=_share(H200_MATMUL, "assumed"),
    hbm=_share(0.90, "assumed"),  # the H200 of docs/performance/h200-llama-3-8b.md reads 4.31 of 4.8 TB/s
    attention_matmul=_share(H200_ATTENTION_MATMUL, "assumed"),
    attention_hbm=_share(H200_ATTENTION_HBM, "assumed"),
    network=_share(0.75, "assumed"),
    product_overlap=_share(H200_OVERLAP, "assumed"),
    layer_seconds=_seconds(H200_LAYER, "assumed"),  # launches inside a captured graph, and kernels that start and end
    step_seconds=_seconds(0.0, "assumed"),
    eager_seconds=_seconds(H200_EAGER, "assumed"),
    overlap=_share(0.95, "assumed"),
    host_attention=_rate(100 * GB, "assumed"),  # bytes of KV that the CPU attends to per second
    device_usable=_share(0.90, "assumed"),
    host_usable=_share(0.90, "assumed"),
    read_cached=_share(0.0, "assumed"),
    write_cached=_share(0.0, "assumed"),
    disk_op_seconds=_seconds(1e-4, "assumed"),
    unpack_seconds=_seconds(0.0, "assumed"),
)


def _pcie(h2d: float, d2h: float, source: Origin) -> tuple[Link, Link]:
    latency = _seconds(1e-5, "assumed")
    return (
        Link("host", "device", _rate(h2d, source), latency),
        Link("device", "host", _rate(d2h, source), latency),
    )


def flexgen_t4() -> Machine:
    """The machine of FlexGen (table 1): one T4, 208 GB of memory, 1.5 TB of cloud disk."""
    to_device, to_host = _pcie(12.9 * GB, 12.9 * GB, "assumed")  # PCIe 3 x16 after protocol overhead
    return Machine(
        name="T4",
        device=Device(
            "NVIDIA T4",
            "gpu",
            _bytes(14.75 * GIB, "measured"),  # what the driver offers of the datasheet's 16 GB
            _rate(320 * GB, "datasheet"),
            _flops(65e12, "datasheet", "float16", "bfloat16"),
            _seconds(5e-6, "assumed"),
            None,
        ),
        num_devices=1,
        per_host=1,
        host=Device("Xeon 2 GHz", "cpu", _bytes(208 * GIB, "datasheet"), _rate(80 * GB, "assumed")),
        to_device=to_device,
        to_host=to_host,
        disk=Device("cloud SSD", "disk", _bytes(1500 * GB, "datasheet"), _rate(2 * GB, "measured")),  # FlexGen §6
        disk_write=_rate(1 * GB, "measured"),  # FlexGen §6
        networks=(Network("Ethernet", 1 << 20, _rate(2 * GB, "assumed"), _seconds(50e-6, "assumed")),),
        constants=Constants(
            matmul=_share(0.318, "fitted"),  # FlexGen table 4: 4.59e16 FLOPs of prefill in 2,220 s are 20.7 TFLOP/s
            hbm=_share(0.78, "assumed"),
            attention_matmul=_share(0.318, "fitted"),  # part of the same 2,220 s
            attention_hbm=_share(0.78, "assumed"),
            network=_share(1.0, "assumed"),
            product_overlap=_share(1.0, "assumed"),
            layer_seconds=_seconds(2e-4, "assumed"),  # eager PyTorch: some ten launches and Python
            step_seconds=_seconds(0.0, "assumed"),
            eager_seconds=_seconds(0.0, "assumed"),  # it is in layer_seconds
            overlap=_share(0.90, "fitted"),  # FlexGen table 5: between 0.59 (none) and 0.69 (all) tok/s
            host_attention=_rate(14 * GB, "fitted"),  # between 30B of table 5 (8.8 GB/s) and 175B of table 4 (17 GB/s)
            device_usable=_share(0.95, "assumed"),
            host_usable=_share(0.95, "assumed"),
            # 175B reads 638 GB of KV a token in 227 s (table 4): 2.8 GB/s from a disk of 2, the rest is the page cache.
            read_cached=_share(0.29, "fitted"),
            # 620 GB of KV are written to a disk of 1 GB/s in 261 s (table 4), of which the link takes 48.
            write_cached=_share(0.66, "fitted"),
            disk_op_seconds=_seconds(4.5e-3, "fitted"),  # FlexGen table 4: 124 s for 23,808 small writes of the decode
            unpack_seconds=_seconds(0.0, "assumed"),
        ),
        price=Measure(0.05, "dollars/h", "measured"),  # FlexGen §6.3: 250 W at 0.2 dollars per kWh
    )


def _server(
    name: str,
    device: Device,
    pcie: tuple[Link, Link],
    nvlink: float,
    wire: float,
    dollars: float,
    measured: Collectives | None = None,
    ranks: RankConstants = UNKNOWN,
) -> Machine:
    return Machine(
        name=name,
        device=device,
        num_devices=1,
        per_host=8,
        host=Device(f"host of 8 {name}", "cpu", _bytes(2048 * GB, "assumed"), _rate(400 * GB, "assumed"), cores=96),
        to_device=pcie[0],
        to_host=pcie[1],
        disk=Device("NVMe", "disk", _bytes(15_000 * GB, "assumed"), _rate(12 * GB, "assumed")),
        disk_write=_rate(6 * GB, "assumed"),
        networks=(
            Network("NVLink", 8, _rate(nvlink, "datasheet"), _seconds(6e-6, "assumed"), measured=measured),
            Network("InfiniBand", 1 << 20, _rate(wire, "datasheet"), _seconds(15e-6, "assumed")),
        ),
        constants=_GPU,
        ranks=ranks,
        price=Measure(dollars, "dollars/h", "assumed"),
    )


def _gpu(name: str, gigabytes: float, rate: float, bf16: float, launch: float) -> Device:
    """A datasheet: memory in GB and GB/s, dense bf16 in TFLOP/s (int8 is twice that); and microseconds of a launch."""
    return Device(
        name,
        "gpu",
        _bytes(gigabytes * GB, "datasheet"),
        _rate(rate * GB, "datasheet"),
        _flops(bf16 * 1e12, "datasheet", "bfloat16", "float16") | _flops(2 * bf16 * 1e12, "datasheet", "int8"),
        _seconds(launch * 1e-6, "assumed"),
    )


def a100() -> Machine:
    """A100 SXM 80 GB, PCIe 4, NVLink 3."""
    # 40.96 dollars an hour for eight: FlexGen §6.3.
    device = _gpu("A100 80 GB", 80, 2039, 312, 4)
    machine = _server("A100", device, _pcie(25 * GB, 25 * GB, "assumed"), 300 * GB, 25 * GB, 5.12)
    hops = (A100_HOP, A100_OUTER_HOP)
    return replace(
        machine,
        constants=replace(machine.constants, network=_share(A100_NETWORK, "fitted")),
        networks=tuple(replace(n, hop=_seconds(hop, "fitted")) for n, hop in zip(machine.networks, hops, strict=True)),
    )


# Fitted to runs of FasterTransformer on 1 to 32 A100, and judged on others (`faster_transformer.py`; a test does both).
# Its collectives wait for launches that no graph captured; ours may be quicker, which has not been measured.
A100_NETWORK, A100_HOP, A100_OUTER_HOP = 0.636, 4.388e-5, 3.561e-5


def h100() -> Machine:
    """H100 SXM, PCIe 5, NVLink 4."""
    device = _gpu("H100 SXM", 80, 3350, 989, 3)
    pcie = _pcie(55 * GB, 53 * GB, "measured")
    return _server("H100", device, pcie, 450 * GB, 50 * GB, 4.0, NVLINK, NVLINK_RANKS)


def h200() -> Machine:
    """H200 SXM: an H100 with 141 GB at 4.8 TB/s. The PCIe rate was measured with pinned memory."""
    device = _gpu("H200 SXM", 141, 4800, 989, 3)
    pcie = _pcie(55 * GB, 53 * GB, "measured")
    machine = _server("H200", device, pcie, 450 * GB, 50 * GB, 5.0, NVLINK, NVLINK_RANKS)
    # The same constants, but here they are known.
    seen = ("matmul", "attention_matmul", "attention_hbm", "product_overlap", "layer_seconds", "eager_seconds")
    fitted = {name: replace(getattr(_GPU, name), source="fitted") for name in seen}
    return replace(machine, constants=replace(_GPU, **fitted, hbm=replace(_GPU.hbm, source="measured")))


def tpu_v4(count: int = 64) -> Machine:
    """A slice of a TPU v4 pod (arXiv 2211.05102): 275 TFLOP/s, 32 GiB at 1,200 GB/s, 270 GB/s over a 3D torus."""
    to_device, to_host = _pcie(12 * GB, 12 * GB, "assumed")
    return Machine(
        name="TPUv4",
        device=Device(
            "TPU v4",
            "gpu",
            _bytes(32 * GIB, "datasheet"),
            _rate(1200 * GB, "datasheet"),
            _flops(275e12, "datasheet", "bfloat16"),
            _seconds(0.0, "assumed"),
        ),
        num_devices=count,
        per_host=4,
        host=Device("host of 4 TPU v4", "cpu", _bytes(400 * GB, "assumed"), _rate(200 * GB, "assumed")),
        to_device=to_device,
        to_host=to_host,
        networks=(Network("ICI", 4096, _rate(270 * GB, "datasheet"), _seconds(TPU_HOP, "fitted"), "torus", TPU_CUBE),),
        constants=replace(
            _GPU,
            matmul=_share(TPU_MATMUL, "fitted"),
            hbm=_share(TPU_HBM, "fitted"),
            attention_matmul=_share(TPU_MATMUL, "fitted"),
            attention_hbm=_share(TPU_HBM, "fitted"),
            network=_share(TPU_NETWORK, "fitted"),
            product_overlap=_share(1.0, "assumed"),
            layer_seconds=_seconds(0.0, "assumed"),
            eager_seconds=_seconds(0.0, "assumed"),
            device_usable=_share(1.0, "assumed"),
        ),
        price=Measure(3.22, "dollars/h", "datasheet"),  # list price per chip
    )


# Fitted to the eight published times of PaLM (`calibration.py`; a test repeats the fit, and fits 540B alone). The share
# of the network is low because 270 GB/s needs all three axes of the torus busy, and a collective over one has a third.
TPU_MATMUL, TPU_HBM, TPU_NETWORK, TPU_HOP = 0.748, 0.803, 0.368, 3.85e-6
# The maker's pages: only slices whose sides are multiples of 4 are tori, smaller ones are meshes.
TPU_CUBE = 64


def laptop() -> Machine:
    """A laptop with a GPU of 8 GB behind eight PCIe 4 lanes, 32 GB of memory and one NVMe disk."""
    to_device, to_host = _pcie(12 * GB, 12 * GB, "assumed")
    return Machine(
        name="laptop",
        device=Device(
            "laptop GPU 8 GB",
            "gpu",
            _bytes(8 * GIB, "datasheet"),
            _rate(256 * GB, "datasheet"),
            _flops(30e12, "assumed", "bfloat16", "float16"),
            _seconds(5e-6, "assumed"),
        ),
        num_devices=1,
        per_host=1,
        host=Device("8 cores", "cpu", _bytes(32 * GB, "assumed"), _rate(60 * GB, "assumed"), cores=8),
        to_device=to_device,
        to_host=to_host,
        disk=Device("NVMe", "disk", _bytes(500 * GB, "assumed"), _rate(3 * GB, "assumed")),
        disk_write=_rate(2 * GB, "assumed"),
        constants=replace(_GPU, host_attention=_rate(30 * GB, "assumed"), host_usable=_share(0.8, "assumed")),
        price=Measure(0.03, "dollars/h", "assumed"),  # 150 W at 0.2 dollars per kWh
    )


LIBRARY: dict[str, Callable[[], Machine]] = {
    "t4": flexgen_t4,
    "a100": a100,
    "h100": h100,
    "h200": h200,
    "tpuv4": tpu_v4,
    "laptop": laptop,
}

_COUNTED = re.compile(r"^(?:(\d+)x)?([a-z0-9-]+)$")


def machine(name: str) -> Machine:
    """A machine of the library: `h200`, `4xH200`, `64xTPUv4`. Raises ConfigError for an unknown name."""
    match = _COUNTED.match(name.lower())
    if match is None or match[2] not in LIBRARY:
        raise ConfigError(
            f"machine {name!r} is unknown; use a profile's JSON file, {', '.join(LIBRARY)}, or a count of one (4xH200)."
        )
    return LIBRARY[match[2]]().with_devices(int(match[1] or 1))


def from_profile(profile: Profile) -> Machine:
    """The machine that `cellar profile` measured: of as many devices as it names, or as its collectives joined.

    Raises ConfigError if it has no accelerator or no links to it.
    """
    device, host, disk = profile.device("gpu"), profile.device("cpu"), profile.device("disk")
    if device is None or host is None or not device.flops:
        raise ConfigError(
            f"the profile of {profile.machine} names no accelerator with its speed; plan with --machine "
            f"{', '.join(LIBRARY)}, or profile a machine that has one."
        )
    measured = ours(profile.tables[TABLE]) if TABLE in profile.tables else None
    count = max(sum(d.kind == "gpu" for d in profile.devices), measured.ranks if measured else 1)
    down = _wire(profile, host.name, device.name)
    up = _wire(profile, device.name, host.name)
    return Machine(
        name=profile.machine,
        device=device,
        num_devices=count,
        per_host=count,
        host=host,
        to_device=down,
        to_host=up,
        disk=disk,
        disk_write=_wire(profile, host.name, disk.name).bandwidth if disk else None,
        networks=(_of_ranks(measured, count),) if measured else _joined(profile, device, count, down),
        constants=replace(_of_measured(host), network=_share(1.0, "measured")) if measured else _of_measured(host),
        ranks=_assumed(NVLINK_RANKS) if count > 1 else UNKNOWN,
    )


def _assumed(ranks: RankConstants) -> RankConstants:
    """The same figures of a machine on which they were not measured."""
    return RankConstants(*(replace(getattr(ranks, field.name), source="assumed") for field in fields(ranks)))


def _of_ranks(measured: Collectives, count: int) -> Network:
    """The network that collectives were measured over, said shortly by its largest all-gathers."""
    line = measured.of(Kind.ALL_GATHER.value, count).lines[-1]
    return Network("ranks", count, _rate(line.rate, "measured"), _seconds(line.start, "measured"), measured=measured)


def _joined(profile: Profile, device: Device, count: int, to_device: Link) -> tuple[Network, ...]:
    """What joins the devices of a profile: as measured from one to another, else as the library knows this device, else
    the way through the host.
    """
    if count == 1:
        return ()
    others = {d.name for d in profile.devices if d.kind == "gpu" and d.name != device.name}
    for link in profile.links:
        if link.source == device.name and link.target in others:
            hop = link.latency or _seconds(1e-5, "assumed")
            return (Network("peer copies", count, link.bandwidth, hop),)
    words = set(re.split(r"[^a-z0-9]+", f"{profile.machine} {device.name}".lower()))
    known = next((make().networks for name, make in LIBRARY.items() if name in words), ())
    # The library's first network is that of one host, as the profile's devices are.
    return known[:1] or (Network("PCIe", count, to_device.bandwidth, _seconds(1e-5, "assumed")),)


def processor(profile: Profile) -> Machine:
    """The processor of a profile as the device that computes, with its own memory: a machine without an accelerator.

    Raises ConfigError if its speed was not measured.
    """
    host = profile.device("cpu")
    if host is None or not host.flops:
        raise ConfigError(
            f"the profile of {profile.machine} has no speed of its processor; make it again with `cellar profile`."
        )
    start = host.launch.value if host.launch else 5e-6
    within = Link(host.name, host.name, host.bandwidth)
    return Machine(
        name=profile.machine,
        device=host,
        num_devices=1,
        per_host=1,
        host=host,
        to_device=within,
        to_host=within,
        constants=replace(
            _of_measured(host),
            product_overlap=_share(1.0, "assumed"),
            layer_seconds=_seconds(LAYER_LAUNCHES * start, "assumed"),
            eager_seconds=_seconds(0.0, "assumed"),
        ),
    )


LAYER_LAUNCHES = 12  # operations of an eager layer: norms, products, rotation, writes, attention, activation


def _of_measured(host: Device) -> Constants:
    """Rates of a profile are what was reached, so they need no share of a peak; attention reaches less than both."""
    return replace(
        _GPU,
        matmul=_share(1.0, "measured"),
        hbm=_share(1.0, "measured"),
        attention_matmul=_share(0.3, "assumed"),
        attention_hbm=_share(0.5, "assumed"),
        host_attention=_rate(0.5 * host.bandwidth.value, "assumed"),
    )


def _wire(profile: Profile, source: str, target: str) -> Link:
    for link in profile.links:
        if (link.source, link.target) == (source, target):
            return link
    raise ConfigError(f"the profile has no link from {source} to {target}; make it again with `cellar profile`.")
