"""LocalRuntime: the model in this process, on the CPU or one accelerator; `open_local`: from options to a runtime."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.core.config import CacheConfig, EngineConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import CopyResult, Placement, StepResult, Tier, TierOrder
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models import fingerprint, hub, loader, registry
from cellar.models.loader import LoadedWeights
from cellar.models.model import Model
from cellar.models.quantization import is_linear
from cellar.ops.attention import Softmax
from cellar.ops.cpu.launch import prepare as prepare_kernels
from cellar.ops.linear.choice import LinearChoice, Shape
from cellar.ops.linear.device import prepare
from cellar.ops.linear.pack import pack
from cellar.ops.linear.weight import Weight
from cellar.quant.device import ChoiceOf, on_device
from cellar.quant.weight import on_cpu
from cellar.runtime.device import resolve_device
from cellar.runtime.memory import device_free, human
from cellar.runtime.offload.forms import streamed_forms
from cellar.runtime.offload.layout import PlacedRows
from cellar.runtime.offload.opened import Offloaded, OffloadReport, check_offloaded, open_offloaded
from cellar.runtime.pages import Shelf
from cellar.runtime.probes.linear import chooser_of
from cellar.runtime.probes.quantized import quantized_chooser_of
from cellar.runtime.probes.registry import profiles_of
from cellar.runtime.probes.scores import wide_layers
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks.place import Place, Seat
from cellar.runtime.steps.capacity import plan_slots
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.steps.memory_use import MemoryUse, counted, memory_use
from cellar.runtime.steps.placed import PlacedBytes, check_resident, read_back
from cellar.runtime.steps.taken import TakenPages
from cellar.runtime.steps.warmup import Listing, Machine, Warmup, kernels_of
from cellar.runtime.steps.worker import Results, StepWorker
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.arrivals import Arrivals
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.lookup import Lookup
from cellar.runtime.tiers.opened import close_tiers, host_tier, open_tiers
from cellar.runtime.tiers.remote import RemoteTier
from cellar.runtime.tiers.storage import Storage

_LOG = logging.getLogger(__name__)


class LocalRuntime:
    """Implements `Runtime`: one worker, one device. `poll` belongs to the thread that submits; `wake` to any.

    `weights` lie on `device` in the form that its operations want (`open_local` packs them for the CPU).
    `num_threads` is the worker's number of CPU threads; None: chosen while it runs, at most torch's (`threads.py`).
    `enforce_eager`: capture no graphs.
    `most_tokens`: the largest step with prompts that comes, for capturing the short ones. `rehearsed`: these steps were
    captured once in this process, to count their memory. `wide_layers`: those whose
    softmax needs a running maximum on an accelerator; `softmax`: how the others compute theirs there. `tiers`: what
    keeps chunks below the device; they are its own. `warmup`: compilers at work for it, which stop with it.
    `offloaded`: where layers come from that do not lie on the device; its own, too. `seat`: this rank among the
    others, if there are any; what puts it out of step with them comes out of `poll`, as an error. `sparse_v`: see
    `Forward`.
    """

    def __init__(
        self,
        model: Model,
        weights: LoadedWeights,
        *,
        num_slots: int,
        num_rows: int,
        device: torch.device,
        num_threads: int | None = None,
        enforce_eager: bool = False,
        most_tokens: int = 0,
        rehearsed: bool = False,
        wide_layers: Collection[int] = (),
        softmax: Softmax = "auto",
        tiers: Mapping[Tier, Storage] = MappingProxyType({}),
        warmup: Listing | None = None,
        offloaded: Offloaded | None = None,
        seat: Seat | None = None,
        sparse_v: float | None = None,
    ) -> None:
        spec = model.spec
        self._results: Results = SimpleQueue()
        self.memory: MemoryUse | None = None
        self._masks = MaskBox()
        self._closed = False
        self._warmup = warmup
        self._offloaded = offloaded
        self._device = device
        self._host_kv = None if offloaded is None else offloaded.host_kv(spec.kv, num_slots, device)
        arrivals = Arrivals()
        self.executor: StepExecutor | None = StepExecutor(
            model,
            weights,
            num_slots=num_slots,
            num_rows=num_rows,
            device=device,
            # An accelerator's cache has memory of its own.
            memory=None if offloaded is None or device.type != "cpu" else offloaded.memory.carve,
            layers=None if offloaded is None else offloaded.layers,
            batch=None if offloaded is None else offloaded.batch,
            seat=seat,
            host_kv=self._host_kv,
            arrivals=arrivals,
            sparse_v=sparse_v,
            jobs=None if offloaded is None else offloaded.jobs,
        )
        self.executor.forward.keep_maximum(wide_layers)
        self.executor.forward.use_softmax(softmax)
        chunks = ArenaChunks(self.executor.arena, device) if tiers else None
        if not enforce_eager and offloaded is not None and offloaded.recorder is not None:
            self.executor.record_layers(offloaded.recorder, num_rows, offloaded.capacity)
        # A captured step has its weights at fixed addresses.
        if not enforce_eager and offloaded is None:
            parts = chunks.part_of_layer if chunks is not None and Tier.HOST in tiers else ()
            self.executor.capture(num_rows, most_tokens, parts=parts, ran=rehearsed)
        if device.type != "cpu":
            # Weights and arena were filled by this thread; the worker's first step must find them.
            torch.cuda.synchronize(device)
        self._copier: Copier | None = None
        if chunks is not None:
            self._copier = Copier(chunks, tiers, self._results.put, arrivals)
        shared = tiers.get(Tier.REMOTE)
        self.lookup: Lookup | None = Lookup(shared) if isinstance(shared, RemoteTier) else None
        self._capacity = Capacity(
            num_slots,
            num_rows,
            spec.kv.chunk_size,
            spec.max_position,
            {tier: storage.num_slots for tier, storage in tiers.items()},
            self._copier.kept if self._copier is not None else {},
            1 if seat is None or seat.laid is None else seat.laid.layouts.homes,
        )
        self._link = None if seat is None else seat.link
        prepare = None if device.type == "cpu" else self.executor.prepare
        own = device.type == "cpu" and offloaded is None
        self._pages = pages = TakenPages(self.executor.arena) if own else None
        self._worker = StepWorker(0, self.executor, self._results, self._masks, device, num_threads, prepare, pages)

    @property
    def workers(self) -> Sequence[StepWorker]:
        """The one worker."""
        return (self._worker,)

    @property
    def offload(self) -> OffloadReport | None:
        """Where its weights lie, if they are streamed."""
        return None if self._offloaded is None else self._offloaded.report

    @property
    def waited(self) -> float | None:
        """Seconds that this rank has waited for others on its processor; None: it has none, or an accelerator waits."""
        found: float | None = getattr(self._link, "waited", None)
        return found if self._device.type == "cpu" else None

    @property
    def capacity(self) -> Capacity:
        """Slots, rows, tokens of a chunk, longest sequence."""
        return self._capacity

    def copy(self, batch: TierOrder) -> None:
        """Hand over copies; never blocks. Raises ConfigError for a tier that is not there, or a step to wait."""
        if self._copier is None:
            raise ConfigError("this runtime has no tiers to copy chunks between; plan without copies.")
        self._copier.submit(batch)

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results so far, FIFO; waits up to `timeout` seconds (None: for ever) for a first one or `wake`."""
        found: list[StepResult | CopyResult] = []
        queue = self._results
        wait = not self._closed and (timeout is None or timeout > 0)
        try:
            item = queue.get(wait, timeout if wait else None)
            while True:
                if isinstance(item, CopyResult):
                    found.append(item)
                elif isinstance(item, Exception):
                    raise item
                elif item is not None:
                    worker, result = item
                    worker.num_collected += 1
                    found.append(result)
                item = queue.get_nowait()
        except Empty:
            return found

    def wake(self) -> None:
        """End a waiting `poll` from another thread; if none waits, the next one returns at once."""
        self._results.put(None)

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        """Token bit masks for the masked rows of a submitted step; see `masks.py`. Rows may come one by one."""
        self._masks.supply(step, masks)

    def masking(self, threads: int) -> None:
        """So many threads compute masks now: a worker on a processor takes that into account; see `company.py`."""
        self._masks.company.now(threads, time.perf_counter())

    def close(self) -> None:
        """Stop the worker after the step it is at, drop later plans, free the memory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._warmup is not None:
            self._warmup.close()
        self._masks.close()
        self._worker.close()
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        if self._offloaded is not None:
            self._offloaded.close()
            self._offloaded = None
        if self._host_kv is not None:
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device)
            self._host_kv.close()
            self._host_kv = None
        if self.lookup is not None:
            self.lookup.close()
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self.executor = None
        if self._device.type != "cpu":
            torch.cuda.empty_cache()
        self.wake()


@dataclass(frozen=True)
class OpenedModel:
    """A runtime, what it runs, where that was found, and the options with nothing left to decide.

    `fingerprint` is that of the weights: see `models/fingerprint.py`. `start_seconds`: by phase: load (weights, while
    kernels are listed and compiled), compile (what was left of it), rehearse (the largest steps, which say what
    memory is left), capture, memory (waiting for the host's, if a tier lies there).
    """

    runtime: LocalRuntime
    spec: ModelSpec
    config: EngineConfig
    directory: Path | None
    load_seconds: float
    fingerprint: bytes
    memory: MemoryUse
    placed: PlacedBytes | None = None
    offload: OffloadReport | None = None
    start_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def offloads(self) -> Sequence[OffloadReport]:
        """As of several ranks: one, if weights are streamed."""
        return () if self.offload is None else (self.offload,)


Identify = Callable[[ModelSpec, bytes], bytes]
"""From a model and the fingerprint of its weights to that of its KV, as `kv/identity.py` has it."""


def open_local(
    config: EngineConfig,
    directory: Path | None = None,
    placement: Placement | None = None,
    identify: Identify | None = None,
    place: Place | None = None,
) -> OpenedModel:
    """`_open` in a thread of its own, which takes its OpenMP team with it when it ends.

    OpenMP counts the teams of all threads: with a second one idle beside the worker's it finds the cores
    oversubscribed, lets nobody spin for a moment, and every parallel operation pays for a sleep and a wake-up (1.5x at
    one token).
    """
    with ThreadPoolExecutor(1, "cellar-open") as thread:
        return thread.submit(_open, config, directory, placement, identify, place).result()


def _open(
    config: EngineConfig,
    directory: Path | None,
    placement: Placement | None,
    identify: Identify | None,
    place: Place | None,
) -> OpenedModel:
    """Load a model and make a runtime for it.

    `directory` is that of the checkpoint; without it `config.model.model` is looked for: a directory, the name of a
    config that ships with the package (dummy weights only), or a repository of the hub.
    With a `placement` there are as many slots as it has chunks, and what lies in memory is compared with it. Tiers that
    outlive the process need `identify`. With a `place` it is one rank of several: what is loaded is its share.
    Raises DeviceError, CheckpointError, ConfigError, or CapacityError if weights or one request do not fit.
    """
    device = resolve_device(config.device.device)
    config = config.on(device.type)
    model, dtype, directory = _found(config, directory, device)
    seat = None if place is None else place.take(model, device)
    if seat is not None:
        model = seat.model
    laid = None if seat is None else seat.laid
    spec = model.spec if seat is None else seat.stored
    offloads = placement is not None and placement.kind == "offload"
    rows: Mapping[str, Sequence[PlacedRows]] = {}
    if placement is not None:
        if offloads:
            rows = check_offloaded(placement, spec, device)
            _check_tiers(config.cache, placement)
        else:
            check_resident(placement, spec)
    if device.type != "cpu" and config.model.quantization == "w8a8":
        raise ConfigError(f"quantization w8a8 runs on a CPU so far, but the device is {device}; take int8 or fp8.")
    sparse_v = config.offload.sparse_v
    if sparse_v is not None:
        _check_sparse(device, placement)
    if not offloads:
        _check_fits(spec, device)
    before = counted(device)
    start = time.perf_counter()
    # What layouts gather is gathered as it is stored.
    gathers = laid is not None and laid.layouts.gathers
    change: loader.Transform | None = None if gathers else _packing(Shelf())
    wide: Collection[int] = ()
    warmup: Listing | None = None
    if device.type == "cpu":
        prepare_kernels(getattr(torch, dtype), sparse=sparse_v is not None)
    else:
        profiles = profiles_of(config.device.machine_profile, device)
        prepared = _preparing(chooser_of(profiles), quantized_chooser_of(profiles))
        change = None if gathers else prepared
        if config.model.load_format != "dummy" and directory is not None:
            wide = wide_layers(profiles, directory)
            wide = wide if seat is None else seat.own(wide)
        if not config.device.enforce_eager and laid is None and (seat is None or seat.stages is None):
            ranks = 1 if place is None else place.size
            forms = streamed_forms(rows) if offloads else prepared
            warmup = Listing(partial(_warmup, model, forms, device, config, tuple(wide), ranks, streamed=offloads))
    with ExitStack() as undo:
        # Beside the weights: what takes the host's memory would slow the first requests' steps.
        host = None if offloads else host_tier(config.cache, model.spec.kv, device)
        if host is not None:
            undo.callback(host.close)
        streamed = placement if offloads else None
        weights, content, offloaded = _made(config, spec, directory, device, streamed, change, undo)
        loaded = time.perf_counter()
        if warmup is not None:
            warmup.wait()
        compiled = time.perf_counter()
        num_slots = plan_slots(
            model,
            weights,
            config.cache,
            config.schedule,
            device,
            enforce_eager=config.device.enforce_eager or offloads,
            planned=placement.num_chunks if placement is not None else None,
            seat=seat,
            offloaded=offloaded,
            held=config.offload.nbytes["device"] if device.type != "cpu" else None,
            wide_layers=wide,
        )
        rehearsed = time.perf_counter()
        homes = 1 if laid is None else laid.layouts.homes
        num_rows = -(-config.schedule.max_num_seqs // homes) * homes
        known = identify and identify(model.spec, content)
        tiers = open_tiers(config.cache, model.spec.kv, num_slots, device, known, host)
        undo.callback(close_tiers, tiers)
        runtime = LocalRuntime(
            model,
            weights,
            num_slots=num_slots,
            num_rows=num_rows,
            device=device,
            num_threads=_threads(config.device.num_threads, offloaded),
            enforce_eager=config.device.enforce_eager,
            most_tokens=config.schedule.max_num_batched_tokens or 0,
            rehearsed=device.type != "cpu" and not offloads,
            wide_layers=wide,
            tiers=tiers,
            warmup=warmup,
            offloaded=offloaded,
            seat=seat,
            sparse_v=sparse_v,
        )
        undo.pop_all()
    if isinstance(below := tiers.get(Tier.HOST), HostTier):
        below.settle()
    assert runtime.executor is not None
    arena = runtime.executor.arena
    placed: PlacedBytes | None = None
    if placement is not None and not offloads:
        placed = read_back(placement, replace(spec, kv=model.spec.kv), weights, arena)
    report = None if offloaded is None else offloaded.report
    host_kv = runtime.capacity.tiers.get(Tier.HOST, 0) * model.spec.kv.chunk_nbytes()
    memory = memory_use(weights, arena, host_kv, device, before)
    if report is not None:
        memory = replace(memory, weights=report.weights["device"])
    _LOG.info("%s", memory.line())
    runtime.memory = memory
    resolved = config.resolve(dtype=dtype, max_model_len=spec.max_position, device=str(device))
    ready = time.perf_counter()
    times = {
        "load": loaded - start,
        "compile": compiled - loaded,
        "rehearse": rehearsed - compiled,
        "capture": ready - rehearsed,
    }
    return OpenedModel(runtime, spec, resolved, directory, loaded - start, content, memory, placed, report, times)


def _found(config: EngineConfig, directory: Path | None, device: torch.device) -> tuple[Model, str, Path | None]:
    """The model that is asked for, its dtype, and where its checkpoint lies; None: nowhere, it is a shipped config."""
    asked = config.model
    raw: Mapping[str, object] | None = None
    if directory is None:
        if asked.model is None:
            raise ConfigError("no model is given; give a directory or a hub name.")
        if asked.load_format == "dummy":
            raw = registry.shipped_config(asked.model)
        if raw is None:
            directory = hub.resolve(asked.model)
    if raw is None:
        assert directory is not None
        raw = registry.read_config(directory)
    dtype = registry.auto_dtype(raw, device.type) if asked.dtype == "auto" else asked.dtype
    chunk, kept = config.cache.block_size, config.cache.kv_cache_dtype
    model = registry.open_model(raw, dtype, chunk, asked.max_model_len, asked.quantization, kept)
    return model, dtype, directory


def _made(
    config: EngineConfig,
    spec: ModelSpec,
    directory: Path | None,
    device: torch.device,
    placement: Placement | None,
    change: loader.Transform | None,
    undo: ExitStack,
) -> tuple[LoadedWeights, bytes, Offloaded | None]:
    """The weights, the fingerprint of what they compute, and how they are streamed if they are: by a `placement`, until
    `undo` ends it.
    """
    asked, offloaded = config.model, None
    if asked.load_format == "dummy":
        make = loader.dummy_reader(device, asked.seed)
        content = fingerprint.of_dummy(spec, asked.seed, device.type)
    else:
        assert directory is not None
        # What may not stay on the device is not read there.
        make = loader.reader(spec, directory, device if placement is None else "cpu")
        content = fingerprint.of_checkpoint(directory)
    if placement is None:
        weights = loader.assembled(spec, make, change)
    else:
        sizes, path = config.offload.nbytes, config.offload.disk_path
        disk = None if path is None else Path(path)
        offloaded = open_offloaded(spec, placement, make, device, sizes, disk, config.device.num_threads)
        undo.callback(offloaded.close)
        _LOG.info("%s", offloaded.report.line())
        weights = offloaded.weights
    if asked.quantization is not None:
        content = fingerprint.of_quantized(content, asked.quantization)
    if config.offload.sparse_v is not None:
        content = fingerprint.of_sparse(content, config.offload.sparse_v)
    return weights, content, offloaded


def _warmup(
    model: Model,
    change: loader.Transform,
    device: torch.device,
    config: EngineConfig,
    wide: Sequence[int],
    ranks: int,
    *,
    streamed: bool,
) -> Warmup:
    """Compilers at work on the model's kernels."""
    rows, tokens = config.schedule.max_num_seqs, config.schedule.max_num_batched_tokens or 0
    return Warmup.on(device, kernels_of(model, change, Machine.of(device), rows, tokens, wide, ranks, streamed))


def _check_tiers(cache: CacheConfig, placement: Placement) -> None:
    """Raise ConfigError for tiers below KV that a plan puts in host memory, before weights are placed there."""
    asked = (cache.kv_offloading_size, cache.kv_disk_size, cache.kv_remote_size)
    if any(asked) and any(part.device == "host" for part in placement.kv):
        raise ConfigError(
            "the plan puts KV in host memory, and it is not kept in tiers below that yet; leave kv_offloading_size, "
            "kv_disk_size and kv_remote_size out, or plan with KV on the device (kv_cache_memory_bytes)."
        )


def _check_sparse(device: torch.device, placement: Placement | None) -> None:
    """Raise ConfigError if anything but the CPU attends to decodes."""
    if device.type == "cpu":
        return
    kv = () if placement is None else placement.kv
    if not kv or any((part.device, part.compute) != ("host", "host") for part in kv):
        raise ConfigError(
            f"sparse_v is attention of the CPU, but here {device} attends to KV; leave sparse_v out, set device to "
            "cpu, or have KV in host memory by device_memory and a larger kv_cache_memory_bytes."
        )


def _threads(asked: int | None, offloaded: Offloaded | None) -> int | None:
    """How long a layer takes says nothing about threads while the computation waits for weights."""
    return torch.get_num_threads() if asked is None and offloaded is not None else asked


def _packing(shelf: Shelf) -> loader.Transform:
    """Each matrix in the form that the CPU multiplies; quantized ones are read faster from huge pages."""

    def change(spec: TensorSpec, weight: Weight) -> Weight:
        if not isinstance(weight, torch.Tensor):
            return on_cpu(weight, shelf.put)
        return pack(weight) if is_linear(spec) else weight

    return change


def _preparing(choice_of: Callable[[Shape], LinearChoice | None], quantized_choice_of: ChoiceOf) -> loader.Transform:
    """Each matrix gets its counters and its choice of kernels."""

    def change(spec: TensorSpec, weight: Weight) -> Weight:
        if not isinstance(weight, torch.Tensor):
            return on_device(weight, quantized_choice_of)
        return prepare(weight, choice_of(Shape(*weight.shape))) if is_linear(spec) else weight

    return change


def _check_fits(spec: ModelSpec, device: torch.device) -> None:
    free = device_free(device)
    if spec.nbytes() > free:
        raise CapacityError(
            f"the weights take {human(spec.nbytes())} in {spec.dtype}, but {device} has {human(free)} of memory free; "
            "take a smaller model, quantize it (quantization), take another device, or give device_memory, which lets "
            "weights lie elsewhere."
        )
