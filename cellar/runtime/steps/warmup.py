"""What a model's kernels need from the compilers before its first step, listed as data and compiled side by side.

The list comes from the code that launches: the captured steps of the model are run once on meta tensors, which compute
nothing (`ops/compile_jobs.py`), beside the first weights. Compilers then work in threads while weights are read, and
the capture finds every kernel made and loaded. Kernels that only some requests want follow behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cellar.core.cores import num_cores
from cellar.core.specs import ModelSpec
from cellar.models import loader
from cellar.models.loader import LoadedWeights
from cellar.models.model import Comm, Model
from cellar.ops.attention import AttentionBuffers, AttentionShape, AttentionWork
from cellar.ops.attention.hopper import decode_source, prompt_source, sizes_for
from cellar.ops.attention.plan import FEW, GRAPH_TILE, HOPPER_TILE, Captured
from cellar.ops.compile_jobs import key_of, on_target
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.hopper import DTYPES, hopper_available
from cellar.ops.linear.choice import WIDE_FROM
from cellar.ops.linear.device import DeviceWeight
from cellar.ops.linear.hopper import wide_source
from cellar.ops.linear.weight import Weight
from cellar.ops.norm import add_rms_norm_behind_sum
from cellar.ops.sampling import choose, forbid, penalize
from cellar.ops.sampling.triton import score_targets
from cellar.ops.triton_support import Launch, noted_launches
from cellar.quant.bytes import ByteWeight
from cellar.quant.device import PackedWeight
from cellar.quant.nibbles import NibbleWeight
from cellar.quant.weight import StackedWeight
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.forward import Forward
from cellar.runtime.steps.graphs import batch_sizes, prompt_sizes
from cellar.runtime.transfer import pull, to_host

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

_LOG = logging.getLogger(__name__)
META = torch.device("meta")
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class CudaJob:
    """A kernel in CUDA C++ and the constants it is compiled with."""

    source: str
    constants: tuple[tuple[str, int], ...]

    def compile(self) -> None:
        """By NVRTC, onto the disk, where the first launch finds it."""
        compile_cuda(self.source, dict(self.constants))


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model needs: `first` and `cuda` before its first step, `later` for what some requests ask."""

    first: tuple[Launch, ...]
    later: tuple[Launch, ...]
    cuda: tuple[CudaJob, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a list depends on: programs that the device runs at once, whether it has the kernels for Hopper."""

    programs: int
    hopper: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Of an accelerator that is here."""
        properties = torch.cuda.get_device_properties(device)
        return cls(2 * properties.multi_processor_count, hopper_available(device))


def kernels_of(
    model: Model,
    prepare: loader.Transform,
    machine: Machine,
    num_rows: int,
    most_tokens: int,
    wide: Sequence[int] = (),
    ranks: int = 1,
    streamed: bool = False,
) -> Kernels:
    """List the kernels of a model's captured steps: up to `num_rows` decodes, prompts of up to `most_tokens`.

    `prepare` is what loading does to each weight; `wide`: layers that keep their maximum; `ranks`: how many
    share the model, of which this is one's share; `streamed`: steps are not captured, and have any number of tokens.
    """
    spec = model.spec
    dtype = getattr(torch, spec.dtype)
    with Shapes(), torch.inference_mode():
        forward = _forward(model, prepare, AbsentRanks(spec.vocab_size) if ranks > 1 else None)
        forward.keep_maximum([j for j in wide if j < len(forward.weights.layers)])
        with noted_launches() as notes:
            _run_captured(forward, machine, num_rows, most_tokens, uneven=streamed)
        first = [launch for launch in notes if not (machine.hopper and _hopper_has(launch, forward, dtype))]
        with noted_launches() as notes:
            _run_transfers()
            _run_rehearsal(spec, dtype)
        first += notes
        with noted_launches() as notes:
            _run_rare(spec, dtype)
        cuda = tuple(dict.fromkeys(_cuda_jobs(forward, dtype, machine.programs // 2))) if machine.hopper else ()
    return Kernels(tuple(first), tuple(notes), cuda)


class Shapes(TorchFunctionMode):
    """What a sum, a product or a copy makes of tensors on the meta device. Torch's own way there imports its compiler
    and a library for algebra: one to three seconds of a start.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch does it, but for these operations."""
        made = _MADE.get(func)
        tensors = [x for x in (args[0] if func is torch.cat else args) if isinstance(x, Tensor)] if made else []
        if made is None or kwargs or not all(x.is_meta for x in tensors):
            return func(*args, **(kwargs or {}))
        return made(*args)


def _by_number(x: Tensor | float, y: Tensor | float) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    assert isinstance(like, Tensor)
    shapes = [t.shape for t in (x, y) if isinstance(t, Tensor)]
    return like.new_empty(np.broadcast_shapes(*shapes), dtype=torch.result_type(x, y))


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return tensors[0].new_empty(shape)


def _alike(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_MADE: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.Tensor.add: _by_number,
    torch.Tensor.mul: _by_number,
    torch.cat: _joined,
    torch.empty_like: _alike,
}


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """Implements `Comm` for tensors without content, by their shapes."""

    vocab_size: int
    loop: None = None

    @property
    def normed_sums(self) -> AbsentRanks:
        """The one whose kernel is not noted elsewhere: a norm right behind a sum."""
        return self

    def take(self, like: Tensor, apart: bool = True) -> bool:
        """Of many rows, whose sums may be large."""
        return apart and len(like) >= WIDE_FROM

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implements `NormedSums`."""
        return add_rms_norm_behind_sum(residual, part, norm, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Of the head's columns."""
        return x.new_empty((len(x), self.vocab_size))


def _forward(model: Model, prepare: loader.Transform, comm: Comm | None) -> Forward:
    """Of as many layers as there are kinds of them, and two: the first one has no residual to add."""
    spec = model.spec
    empty = {
        "embedding": spec.embedding,
        "head": [t for t in spec.head if not (spec.tied_head and t.name == "lm_head")],
    }
    kinds = [(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window) for layer in spec.layers]
    count = max(2, 1 + max(kinds.index(kind) for kind in kinds))

    def made(tensors: Any) -> dict[str, Any]:
        return {t.name: prepare(t, loader.meta_reader(t)) for t in tensors}

    head = made(empty["head"])
    if spec.tied_head:
        head |= made(t for t in spec.head if t.name == "lm_head")
    layers = [made(layer.tensors) for layer in spec.layers[:count]]
    weights = LoadedWeights(made(empty["embedding"]), layers, head)
    return Forward(model, weights, Arena(spec.kv, 2, META), META, comm)


def _run_captured(forward: Forward, machine: Machine, num_rows: int, most_tokens: int, *, uneven: bool = False) -> None:
    """The steps that `StepGraphs` records, with the same numbers of tokens and programs.

    Of prompts these are multiples of 16, for which a compiler makes kernels of their own; `uneven`: others, too.
    """
    spec = forward.model.spec
    programs = machine.programs
    table = torch.empty((num_rows + 1, -(-spec.max_position // spec.kv.chunk_size)), dtype=torch.int32, device=META)

    def layers(size: int, limit: Callable[[AttentionShape], Captured]) -> Any:
        works = []
        for shape in forward.shapes:
            buffers = AttentionBuffers(1, 1, 1, shape, META, depth=0)
            works.append(replace(AttentionWork.for_graph(shape, buffers, limit(shape)), programs=programs))
        number = torch.empty(size, dtype=torch.int64, device=META)
        return forward.run(works, number, number, number, table)

    prompts = prompt_sizes(most_tokens)
    for size in (*prompts, *(size - 1 for size in prompts if uneven)):
        layers(size, lambda shape: Captured.prompts(size, num_rows, shape, programs, _tile(shape, machine)))  # noqa: B023
    for size in batch_sizes(num_rows):
        decodes = layers(size, lambda shape: Captured.decodes(size, shape, programs, _tile(shape, machine)))  # noqa: B023
        logits = forward.logits(decodes)
        _choose(logits, greedy=True, cut=False)


def _tile(shape: AttentionShape, machine: Machine) -> int:
    return HOPPER_TILE if machine.hopper and shape.suits_hopper else GRAPH_TILE


def _choose(logits: Tensor, *, greedy: bool, cut: bool, numbers: tuple[Tensor, Tensor] | None = None) -> None:
    """`numbers`: temperatures and bounds of probability, float32 [3, n], and seeds, places, top_k, int64 [3, n], as
    `DeviceRows` packs them; without them each is a tensor of its own, as for rows that are all greedy."""
    if numbers is None:
        real, integer = (torch.empty(len(logits), dtype=d, device=META) for d in (torch.float32, torch.int64))
        choose(logits, real, integer, real, real, integer, integer, greedy, cut)
        return
    (temperature, top_p, min_p), (seed, place, top_k) = numbers
    choose(logits, temperature, top_k, top_p, min_p, seed, place, greedy, cut)


def _run_rehearsal(spec: ModelSpec, dtype: torch.dtype) -> None:
    """What the largest steps ask besides, before memory is counted: penalties, masks, log-probabilities, all cuts."""
    for count in (4, 1):
        _penalize(spec, count)
        logits = torch.empty((count, spec.vocab_size), dtype=torch.float32, device=META)
        _choose(logits, greedy=False, cut=True, numbers=_packed(count))
    for logits_dtype in (dtype, torch.float32):
        _score(torch.empty((4, spec.vocab_size), dtype=logits_dtype, device=META))


def _run_transfers() -> None:
    """Words in, and results out: counts of 1, multiples of 16 and others."""
    for count in (1, 16, 17):
        words = torch.empty(32, dtype=torch.int32, device=META)
        pull(words, words, count)
        for dtype in (torch.int64, torch.bool, torch.float32):
            to_host(torch.empty(count, dtype=dtype, device=META))


def _run_rare(spec: ModelSpec, dtype: torch.dtype) -> None:
    """What requests may ask besides: drawing with and without cuts, penalties, masks. Packed numbers of one row, of two
    and of four lie at addresses that compilers tell apart."""
    for count in (1, 4, 2):
        for logits_dtype, cut in ((dtype, True), (dtype, False), (torch.float32, True), (torch.float32, False)):
            logits = torch.empty((count, spec.vocab_size), dtype=logits_dtype, device=META)
            _choose(logits, greedy=False, cut=cut, numbers=_packed(count))
        _penalize(spec, count)
    logits = torch.empty((4, spec.vocab_size), dtype=torch.float32, device=META)
    rows = torch.empty(4, dtype=torch.int64, device=META)
    forbid(logits, rows, torch.empty((4, -(-spec.vocab_size // 32)), dtype=torch.int32, device=META))


def _packed(count: int) -> tuple[Tensor, Tensor]:
    reals = torch.empty((3, count), dtype=torch.float32, device=META)
    return reals, torch.empty((3, count), dtype=torch.int64, device=META)


def _penalize(spec: ModelSpec, count: int) -> None:
    logits = torch.empty((count, spec.vocab_size), dtype=torch.float32, device=META)
    where, slots = torch.empty((2, count), dtype=torch.int64, device=META)
    prompt = torch.empty((count, spec.vocab_size), dtype=torch.bool, device=META)
    penalize(logits, where, slots, prompt, prompt.to(torch.int32), *_packed(count)[0])


def _score(logits: Tensor) -> None:
    score_targets(logits, torch.empty(len(logits), dtype=torch.int64, device=META))


def _hopper_has(launch: Launch, forward: Forward, dtype: torch.dtype) -> bool:
    """Whether Hopper's own kernels run in place of this launch of Triton's."""
    if dtype not in DTYPES:
        return False
    given = launch.kwargs
    if launch.kernel.__name__ == "_attention_kernel":
        heads = (given["DIM"], given["GROUP"], given["WINDOW"])
        of = [s for s in forward.shapes if (s.head_dim, s.group, s.window or 0) == heads]
        if given["WIDE"]:
            return any(shape.suits_hopper for shape in of)
        return any(shape.decodes_on_hopper for shape in of)
    if launch.kernel.__name__ == "_flat_kernel" and given["MP"] > WIDE_FROM:
        x, weight = launch.args[:2]
        same = [w for w in _matrices(forward) if w.matrix.shape == weight.shape]
        return all(w.choice.wide_at(x.shape[0]) is not None for w in same)
    return False


def _matrices(forward: Forward) -> list[DeviceWeight]:
    of = (*forward.weights.layers, forward.weights.head)
    every = (part for weights in of for weight in weights.values() for part in _parts(weight))
    return [weight for weight in every if isinstance(weight, DeviceWeight)]


def _parts(weight: Weight) -> Sequence[Weight]:
    """What is multiplied one after another."""
    return weight.parts if isinstance(weight, StackedWeight) else (weight,)


def _cuda_jobs(forward: Forward, dtype: torch.dtype, processors: int) -> Iterator[CudaJob]:
    if dtype not in DTYPES:
        return
    for shape in forward.shapes:
        if shape.decodes_on_hopper:
            counts = (*(n for n in batch_sizes(FEW + 1) if n <= FEW), FEW + 1)  # the last stands for all others
            for decodes in dict.fromkeys(sizes_for(shape, n, processors) for n in counts):
                yield _cuda_job(*decode_source(shape, decodes, dtype))
        plain = replace(shape, kv_format="plain")  # as contexts are written out
        if plain.suits_hopper:
            yield _cuda_job(*prompt_source(plain, HOPPER_TILE, dtype))
    for weights in (*forward.weights.layers, forward.weights.head):
        for name, weight in ((name, part) for name, whole in weights.items() for part in _parts(whole)):
            if isinstance(weight, DeviceWeight):
                bias = f"{name.removesuffix('_proj')}_bias" in weights
                for _, sizes in weight.choice.wide:
                    if sizes is not None:
                        yield _cuda_job(*wide_source(sizes, name == "gate_up", bias, dtype))
            elif isinstance(weight, (NibbleWeight, PackedWeight)) or (
                isinstance(weight, ByteWeight) and dtype in DTYPES
            ):
                sources = weight.sources(f"{name}_bias" in weights, dtype, name == "gate_up")
                yield from (_cuda_job(*source) for source in sources)


def _cuda_job(source: str, constants: dict[str, int]) -> CudaJob:
    return CudaJob(source, tuple(constants.items()))


class Warmup:
    """Compiles a list in threads: `wait` for what the first step needs; the rest goes on behind it.

    `compile_launch` compiles what one launch needs; `load` brings what it made onto the device, of the first ones only:
    the rest is compiled while steps are captured, when nobody else should load. A kernel that does not compile here is
    left for its first launch, which says why. Compilers spend most of their time outside of Python (LLVM, ptxas,
    NVRTC), so threads run side by side.
    """

    def __init__(
        self,
        kernels: Kernels,
        target: GPUTarget,
        compile_launch: Callable[[Launch], Any],
        num_threads: int,
        load: Callable[[Any], object] = lambda made: made,
    ) -> None:
        threads = ThreadPoolExecutor(num_threads, "cellar-compile")
        first, later = distinct(kernels.first, target), distinct(kernels.later, target)
        # The long ones first: attention takes Triton longest, NVRTC up to a second each.
        first.sort(key=lambda launch: launch.kernel.__name__ != "_attention_kernel")
        self._first = [threads.submit(_quietly, job.compile) for job in kernels.cuda]

        def compile_and_load(launch: Launch) -> None:
            load(compile_launch(launch))

        self._first += [threads.submit(_quietly, partial(compile_and_load, launch)) for launch in first]
        self._later = [threads.submit(_quietly, partial(compile_launch, launch)) for launch in later]
        threads.shutdown(wait=False)

    @classmethod
    def on(cls, device: torch.device, kernels: Kernels) -> Warmup:
        """For an accelerator that is here; kernels go where a launch looks for them first."""
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()

        def compile_launch(launch: Launch) -> Any:
            with torch.cuda.device(device):
                return launch.kernel.compiled.warmup(*launch.args, grid=(1,), **on_target(launch.kwargs, target))

        def load(made: Any) -> None:
            # What passes arguments to the kernel is compiled, too, by the C compiler.
            with torch.cuda.device(device):
                _ = made.run

        return cls(kernels, target, compile_launch, min(MOST_THREADS, num_cores()), load)

    def wait(self) -> None:
        """Until all that the first step needs is there."""
        wait(self._first)

    def close(self) -> None:
        """Begin nothing more."""
        for waiting in (*self._first, *self._later):
            waiting.cancel()


class Listing:
    """A warmup whose list is made in a thread of its own: `make` lists, and begins to compile.

    Compilers only save time: where the list cannot be made, each launch compiles its own kernel.
    """

    def __init__(self, make: Callable[[], Warmup]) -> None:
        thread = ThreadPoolExecutor(1, "cellar-list")
        self._made = thread.submit(make)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Until all that the first step needs is there."""
        try:
            warmup = self._made.result()
        except Exception:
            _LOG.warning("kernels are compiled one by one as they are needed: they could not be listed", exc_info=True)
        else:
            warmup.wait()

    def close(self) -> None:
        """Begin nothing more."""
        if not self._made.cancel():
            with suppress(Exception):
                self._made.result().close()


def distinct(launches: Sequence[Launch], target: GPUTarget) -> list[Launch]:
    """One launch for each that the compiler tells apart."""
    return list({key_of(launch, target): launch for launch in reversed(launches)}.values())[::-1]


def _quietly(compile_it: Callable[[], object]) -> None:
    with suppress(Exception):
        compile_it()
