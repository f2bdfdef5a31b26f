"""LocalRuntime: the model in this process, on the CPU or one accelerator; `open_local`: from options to a runtime."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.core.config import EngineConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import CopyResult, Placement, StepResult
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models import hub, loader, registry
from cellar.models.loader import LoadedWeights
from cellar.models.model import Model
from cellar.ops.launch_cpu import prepare as prepare_kernels
from cellar.ops.linear import pack
from cellar.ops.linear_choice import LinearChoice, Shape
from cellar.ops.linear_cuda import prepare
from cellar.runtime.capacity import plan_slots
from cellar.runtime.device import resolve_device
from cellar.runtime.executor import StepExecutor
from cellar.runtime.masks import MaskBox
from cellar.runtime.memory import device_free, human
from cellar.runtime.probes.linear import choices_of
from cellar.runtime.probes.registry import profiles_of
from cellar.runtime.probes.scores import wide_layers
from cellar.runtime.protocol import Capacity
from cellar.runtime.worker import StepWorker


class LocalRuntime:
    """Implements `Runtime`: one worker, one device. `poll` belongs to the thread that submits; `wake` to any.

    `weights` lie on `device` in the form that its operations want (`open_local` packs them for the CPU).
    `num_threads` is the worker's number of CPU threads; None leaves torch's. `enforce_eager`: capture no graphs.
    `most_tokens`: the largest step with prompts that comes, for capturing the short ones. `wide_layers`: those whose
    softmax needs a running maximum on an accelerator.
    Raises ConfigError for a placement that puts anything elsewhere.
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
        wide_layers: Collection[int] = (),
        placement: Placement | None = None,
    ) -> None:
        if placement is not None:
            _check_resident(placement, device)
        spec = model.spec
        self._capacity = Capacity(num_slots, num_rows, spec.kv.chunk_size, spec.max_position)
        self._results: SimpleQueue[tuple[StepWorker, StepResult] | None] = SimpleQueue()
        self._masks = MaskBox()
        self._closed = False
        self._device = device
        self.executor: StepExecutor | None = StepExecutor(
            model, weights, num_slots=num_slots, num_rows=num_rows, device=device
        )
        self.executor.forward.keep_maximum(wide_layers)
        if not enforce_eager:
            self.executor.capture(num_rows, most_tokens)
        if device.type != "cpu":
            # Weights and arena were filled by this thread; the worker's first step must find them.
            torch.cuda.synchronize(device)
        self._worker = StepWorker(0, self.executor, self._results, self._masks, device, num_threads)

    @property
    def workers(self) -> Sequence[StepWorker]:
        """The one worker."""
        return (self._worker,)

    @property
    def capacity(self) -> Capacity:
        """Slots, rows, tokens of a chunk, longest sequence."""
        return self._capacity

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results so far, FIFO; waits up to `timeout` seconds (None: for ever) for a first one or `wake`."""
        found: list[StepResult | CopyResult] = []
        queue = self._results
        wait = not self._closed and (timeout is None or timeout > 0)
        try:
            item = queue.get(wait, timeout if wait else None)
            while True:
                if item is not None:
                    worker, result = item
                    worker.collected()
                    found.append(result)
                item = queue.get_nowait()
        except Empty:
            return found

    def wake(self) -> None:
        """End a waiting `poll` from another thread; if none waits, the next one returns at once."""
        self._results.put(None)

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Token bit masks for the masked rows of a submitted step; see `masks.py`. Rows may come one by one."""
        self._masks.supply(step, masks)

    def close(self) -> None:
        """Stop the worker after the step it is at, drop later plans, free the memory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._masks.close()
        self._worker.close()
        self.executor = None
        if self._device.type != "cpu":
            torch.cuda.empty_cache()
        self.wake()


@dataclass(frozen=True)
class OpenedModel:
    """A runtime, what it runs, where that was found, and the options with nothing left to decide."""

    runtime: LocalRuntime
    spec: ModelSpec
    config: EngineConfig
    directory: Path | None
    load_seconds: float


def open_local(config: EngineConfig, directory: Path | None = None) -> OpenedModel:
    """`_open` in a thread of its own, which takes its OpenMP team with it when it ends.

    OpenMP counts the teams of all threads: with a second one idle beside the worker's it finds the cores
    oversubscribed, lets nobody spin for a moment, and every parallel operation pays for a sleep and a wake-up (1.5x at
    one token).
    """
    with ThreadPoolExecutor(1, "cellar-open") as thread:
        return thread.submit(_open, config, directory).result()


def _open(config: EngineConfig, directory: Path | None) -> OpenedModel:
    """Load a model and make a runtime for it.

    `directory` is that of the checkpoint; without it `config.model.model` is looked for: a directory, the name of a
    config that ships with the package (dummy weights only), or a repository of the hub.
    Raises DeviceError, CheckpointError, ConfigError, or CapacityError if weights or one request do not fit.
    """
    device = resolve_device(config.device.device)
    config = config.on(device.type)
    model_config = config.model
    raw: Mapping[str, object] | None = None
    if directory is None:
        if model_config.model is None:
            raise ConfigError("no model is given; give a directory or a hub name.")
        if model_config.load_format == "dummy":
            raw = registry.shipped_config(model_config.model)
        if raw is None:
            directory = hub.resolve(model_config.model)
    if raw is None:
        assert directory is not None
        raw = registry.read_config(directory)
    dtype = registry.auto_dtype(raw, device.type) if model_config.dtype == "auto" else model_config.dtype
    model = registry.open_model(raw, dtype, config.cache.block_size, model_config.max_model_len)
    spec = model.spec
    _check_fits(spec, device)
    start = time.perf_counter()
    change: loader.Transform = _pack_linear
    wide: Collection[int] = ()
    if device.type == "cpu":
        prepare_kernels(getattr(torch, dtype))
    else:
        profiles = profiles_of(config.device.machine_profile, device)
        change = _preparing(choices_of(profiles))
        if model_config.load_format != "dummy" and directory is not None:
            wide = wide_layers(profiles, directory)
    if model_config.load_format == "dummy":
        weights = loader.dummy(spec, device, model_config.seed, change)
    else:
        assert directory is not None
        weights = loader.load(spec, directory, device, change)
    seconds = time.perf_counter() - start
    runtime = LocalRuntime(
        model,
        weights,
        num_slots=plan_slots(
            model, weights, config.cache, config.schedule, device, enforce_eager=config.device.enforce_eager
        ),
        num_rows=config.schedule.max_num_seqs,
        device=device,
        num_threads=config.device.num_threads,
        enforce_eager=config.device.enforce_eager,
        most_tokens=config.schedule.max_num_batched_tokens or 0,
        wide_layers=wide,
    )
    resolved = config.resolve(dtype=dtype, max_model_len=spec.max_position, device=str(device))
    return OpenedModel(runtime, spec, resolved, directory, seconds)


def _pack_linear(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    return pack(tensor) if loader.is_linear(spec) else tensor


def _preparing(choices: Mapping[Shape, LinearChoice]) -> loader.Transform:
    """Each matrix gets its counters and its choice of kernels; one that no profile knows chooses by its shape."""

    def change(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        if not loader.is_linear(spec):
            return tensor
        n, k = tensor.shape
        return prepare(tensor, choices.get((n, k)))

    return change


def _check_fits(spec: ModelSpec, device: torch.device) -> None:
    free = device_free(device)
    if spec.nbytes() > free:
        raise CapacityError(
            f"the weights take {human(spec.nbytes())} in {spec.dtype}, but {device} has {human(free)} of memory free; "
            "take a smaller model or another device."
        )


def _check_resident(placement: Placement, device: torch.device) -> None:
    """Everything on `device`, whatever index it is named with."""
    names = {str(device), device.type} if device.index in (None, 0) else {str(device)}
    elsewhere = {placement.kv_device, placement.activation_device, *(p.device for p in placement.weights)} - names
    if placement.kind != "resident" or elsewhere:
        where = ", ".join(sorted(elsewhere)) or placement.kind
        raise ConfigError(
            f"this runtime keeps everything on {device}, but the placement says {where}; plan for {device} alone."
        )
