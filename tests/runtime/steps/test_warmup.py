"""What has to be compiled before the first step, as a list; and the threads that compile it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cellar.models.model import Model
from cellar.models.registry import open_model, shipped_config
from cellar.ops.attention import AttentionShape
from cellar.ops.attention.hopper import sizes_for
from cellar.ops.compile_jobs import jobs_of, key_of
from cellar.ops.linear.choice import Shape
from cellar.ops.triton_support import Kernel, Launch
from cellar.planner.capped import Room, capped_plan
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits
from cellar.runtime.offload.forms import streamed_forms
from cellar.runtime.offload.layout import placed_rows
from cellar.runtime.probes.linear import chooser_of
from cellar.runtime.probes.registry import shipped
from cellar.runtime.steps.local import _preparing
from cellar.runtime.steps.warmup import CudaJob, Kernels, Listing, Machine, Shapes, Warmup, distinct, kernels_of
from tests.limits import SECONDS, join_all

H200, PORTABLE = Machine(264, hopper=True), Machine(264)


def target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def model_of(name: str) -> Model:
    config = shipped_config(name)
    assert config is not None
    return open_model(config, "bfloat16")


def listed(name: str, machine: Machine, num_rows: int = 64, most_tokens: int = 256, ranks: int = 1) -> Kernels:
    prepare = _preparing(chooser_of([shipped("h200")]), lambda shape: None)
    return kernels_of(model_of(name), prepare, machine, num_rows, most_tokens, ranks=ranks)


def names(launches: tuple[Launch, ...]) -> Counter[str]:
    return Counter(launch.kernel.__name__ for launch in distinct(launches, target()))


REHEARSED = {"_choose_kernel", "_penalize_kernel", "_target_kernel", "_copy_kernel", "_push_kernel"}
"""Of the largest steps, which are tried before memory is counted; so is the best token of each row. The last two bring
words to the device, and results back."""


@pytest.mark.long
@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
def test_no_list_imports_torchs_compiler_or_algebra(quantization: str | None) -> None:
    """They take one to three seconds of a start; sums and the like on meta tensors ask for them."""
    code = f"""
import sys
from cellar.models.registry import open_model, shipped_config
from cellar.runtime.steps.local import _preparing
from cellar.runtime.steps.warmup import Machine, kernels_of
for name in ("llama-3-8b", "opt-6.7b", "falcon-7b", "command-r", "chatglm2-6b", "starcoder", "qwen3-8b"):
    model = open_model(shipped_config(name), "bfloat16", quantization={quantization!r})
    for hopper in (False, True):
        for ranks in (1, 2):
            change = _preparing(lambda shape: None, lambda shape: None)
            kernels_of(model, change, Machine(264, hopper), 64, 2048, (), ranks)
    found = [module for module in ("torch._dynamo", "sympy") if module in sys.modules]
    assert not found, (name, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_shapes_of_sums_are_those_of_torch() -> None:
    whole, short, column = (torch.empty(*args, device="meta") for args in (((3, 4),), ((4,),), ((3, 1),)))
    numbers = torch.empty((3, 4), dtype=torch.int64, device="meta")
    halves = torch.empty((3, 4), dtype=torch.bfloat16, device="meta")
    made: list[Callable[[], torch.Tensor]] = [
        lambda: whole + short,
        lambda: column + short,
        lambda: numbers + 2,
        lambda: numbers * 0.5,
        lambda: halves * 0.5,
        lambda: halves + whole,
        lambda: torch.cat([halves, halves]),
        lambda: torch.cat([halves, halves], 1),
        lambda: torch.empty_like(halves),
        lambda: torch.empty_like(halves, dtype=torch.int8),
        lambda: torch.ones(3, 1) + torch.ones(4),
    ]
    for make in made:
        meant = make()
        with Shapes():
            found = make()
        assert (found.shape, found.dtype, found.device) == (meant.shape, meant.dtype, meant.device)


def test_a_list_has_every_kernel_of_the_model_and_no_other() -> None:
    found = names(listed("llama-3-8b", PORTABLE).first)
    assert set(found) == {
        "_flat_kernel",
        "_gemv_kernel",
        "_norm_gemv_kernel",
        "_attention_kernel",
        "_rms_norm_kernel",
        "_add_norm_kernel",
        "_rotary_kv_kernel",
        "_activation_kernel",
        *REHEARSED,
    }
    assert sum(found.values()) < 64, "hundreds of launches are few kernels"
    # OPT has positions instead of rotation, layer norms, and ReLU without a gate.
    assert set(names(listed("opt-6.7b", PORTABLE).first)) == {
        "_flat_kernel",
        "_gemv_kernel",
        "_attention_kernel",
        "_add_norm_kernel",
        "_write_kv_kernel",
        "_activation_kernel",
        *REHEARSED,
    }


@pytest.mark.parametrize(
    ("name", "quantization", "kernel", "other"),
    [
        ("opt-30b", "int4", "_tiles_kernel", "_flat_kernel"),
        ("opt-30b", None, "_flat_kernel", "_tiles_kernel"),
        ("llama-3-8b", "int8", "_tiles_kernel", "_flat_kernel"),
    ],
)
def test_what_is_streamed_is_multiplied_in_pieces_by_kernels_of_its_own(
    name: str, quantization: str | None, kernel: str, other: str
) -> None:
    """Codes keep the order of words, in which they lie in host memory; each piece has its share of rows."""
    config = shipped_config(name)
    assert config is not None
    model = open_model(config, "bfloat16", max_model_len=544, quantization=quantization)
    room = Room(device=6 * 2**30, host=90 * 2**30, kind="gpu")
    plan = capped_plan(model.spec, room, Limits(32, 1024, 544), model=name, machine="any", rates=Rates())
    rows = placed_rows(plan.placement, model.spec, "gpu")
    found = kernels_of(model, streamed_forms(rows), H200, 64, 256).first
    assert kernel in names(found)
    assert other not in names(found)
    asked = [launch for launch in found if launch.kernel.__name__ == kernel]
    assert {launch.args[0].shape[0] for launch in asked} >= {8, 16, 32, 64}, "tokens"
    cut = [part.stop - part.start for placed in rows.values() if len(placed) > 1 for part in placed]
    if quantization is None:
        seen = {launch.args[1].shape[0] for launch in asked}
        assert len({count for count in cut if count in seen}) >= 2, "the rows of pieces"


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_steps_of_a_streamed_model_have_any_number_of_tokens(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not captured, so nobody fills their prompts up to multiples of 16."""
    config = shipped_config("llama-3-8b")
    assert config is not None
    model = open_model(config, "bfloat16", max_model_len=544, quantization=quantization)
    room = Room(device=6 * 2**30, host=90 * 2**30, kind="gpu")
    plan = capped_plan(model.spec, room, Limits(32, 1024, 544), model="llama-3-8b", machine="any", rates=Rates())
    forms = streamed_forms(placed_rows(plan.placement, model.spec, "gpu"))

    def products(*, streamed: bool) -> set[str]:
        found = kernels_of(model, forms, H200, 40, 256, streamed=streamed).first
        return {
            key_of(launch, target())
            for launch in found
            if launch.kernel.__name__ in ("_tiles_kernel", "_flat_kernel", "_gemv_kernel")
        }

    listed_too, padded = products(streamed=True), products(streamed=False)
    monkeypatch.setattr("cellar.runtime.steps.warmup.prompt_sizes", lambda most: (3, 21, 57, 77, 120, 144, 201, 250))
    asked = products(streamed=False)
    assert asked <= listed_too
    if quantization is not None:
        assert not asked <= padded, "a list for captured steps alone would leave some out"


def test_what_some_requests_ask_comes_later() -> None:
    found = names(listed("llama-3-8b", PORTABLE).later)
    assert set(found) == {"_choose_kernel", "_penalize_kernel", "_forbid_kernel"}
    assert found["_choose_kernel"] == 12, "with and without cuts, 16-bit logits and adjusted ones, 1, 2 and 4 rows"


def test_packed_numbers_lie_at_addresses_that_compilers_tell_apart() -> None:
    kernels = listed("llama-3-8b", PORTABLE)
    launches = [launch for launch in (*kernels.first, *kernels.later) if launch.kernel.__name__ == "_choose_kernel"]
    drawn = {key_of(launch, target()) for launch in launches if launch.kwargs["DRAW"]}
    # Two kinds of logits, with and without cuts, and three ways to lie.
    assert len(drawn) == 2 * 2 * 3


def test_a_hopper_compiles_its_own_kernels_in_place_of_tritons() -> None:
    portable, hopper = listed("llama-3-8b", PORTABLE), listed("llama-3-8b", H200)
    assert not portable.cuda
    assert len(hopper.cuda) == len(set(hopper.cuda))
    sources = Counter("prompt_attention" in j.source for j in hopper.cuda)
    assert sources[True] >= 1
    # Every wide product that the profile chose, once; decodes, few and many; prompts.
    choose = chooser_of([shipped("h200")])
    shapes = [Shape(n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))]
    choices = [choose(shape) for shape in shapes]
    wide = {(w, shape.n == 28672) for shape, c in zip(shapes, choices, strict=True) if c for _, w in c.wide if w}
    decodes = {sizes_for(AttentionShape(32, 8, 128, 32), n, H200.programs // 2) for n in (1, 2, 4, 8, 16)}
    assert len({sizes.sharers for sizes in decodes}) > 1
    assert len(hopper.cuda) == len(wide) + len(decodes) + 1
    assert not names(hopper.first)["_attention_kernel"], "decodes and prompts have kernels of their own in every step"
    assert names(hopper.first)["_flat_kernel"] < names(portable.first)["_flat_kernel"]


@pytest.mark.parametrize(("ranks", "kinds"), [(1, {False}), (4, {False, True})])
def test_of_several_ranks_a_norm_right_behind_a_sum_is_listed(ranks: int, kinds: set[bool]) -> None:
    launches = distinct(listed("llama-3-8b", H200, ranks=ranks).first, target())
    assert {x.kwargs["EARLY"] for x in launches if x.kernel.__name__ == "_add_norm_kernel"} == kinds


def test_sizes_that_compile_alike_are_one_job() -> None:
    """33 sizes of decodes and prompts: m is 1, a multiple of 16, or neither."""
    kernels = listed("llama-2-7b", PORTABLE)
    jobs = jobs_of(kernels.first, target())
    assert len({job.key for job in jobs}) == len(jobs) == len(distinct(kernels.first, target()))
    assert len(jobs) < len(kernels.first) / 5
    norms = [job for job in jobs if job.kernel.__name__ == "_add_norm_kernel"]
    assert len(norms) == 1


def test_jobs_compile_side_by_side_to_what_one_after_another_gives() -> None:
    """Two threads of Triton's compiler at once, without a device."""
    small = [j for j in jobs_of(listed("llama-3-8b", PORTABLE).first, target()) if "_gemv" in j.kernel.__name__][:3]
    expected = [job.compile().asm["ptx"] for job in small]
    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: small[i].compile().asm["ptx"]})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [found[i] for i in range(3)] == expected


class Compiler:
    """Notes what it is asked; holds what comes later until it is told to go on."""

    def __init__(self, later: set[str]) -> None:
        self.done: list[str] = []
        self.go_on = threading.Event()
        self._later = later

    def __call__(self, launch: Launch) -> None:
        name = launch.kernel.__name__
        if name in self._later:
            self.go_on.wait(SECONDS)
        self.done.append(name)
        if name == "_gemv_kernel":
            raise RuntimeError("a kernel that does not compile is its first launch's to report")


def test_a_start_waits_for_what_the_first_step_needs_and_not_for_the_rest() -> None:
    kernels = listed("llama-3-8b", PORTABLE)
    compiler = Compiler({"_forbid_kernel"})
    warmup = Warmup(kernels, target(), compiler, num_threads=3)
    warmup.wait()
    needed = names(kernels.first)
    assert not needed - Counter(compiler.done)
    assert "_forbid_kernel" not in compiler.done
    warmup.close()
    compiler.go_on.set()


def test_only_what_the_first_step_needs_is_loaded() -> None:
    """The rest is still being compiled while steps are captured."""
    kernels = listed("llama-3-8b", PORTABLE)
    loaded: list[str] = []
    warmup = Warmup(kernels, target(), lambda launch: launch.kernel.__name__, num_threads=3, load=loaded.append)
    warmup.wait()
    assert Counter(loaded) == names(kernels.first)
    for later in warmup._later:
        later.result(SECONDS)
    assert Counter(loaded) == names(kernels.first)


def test_a_list_is_made_beside_other_work(caplog: pytest.LogCaptureFixture) -> None:
    """Weights are read meanwhile; what cannot be listed is no reason not to start."""
    kernels = listed("llama-3-8b", PORTABLE)
    go_on = threading.Event()
    compiler = Compiler({"_forbid_kernel"})

    def make() -> Warmup:
        go_on.wait(SECONDS)
        return Warmup(kernels, target(), compiler, num_threads=3)

    listing = Listing(make)
    assert not compiler.done, "the maker waits, and whoever asked does not"
    go_on.set()
    listing.wait()
    assert not names(kernels.first) - Counter(compiler.done)
    listing.close()
    compiler.go_on.set()

    def breaks() -> Warmup:
        raise ValueError("a kernel that nobody can list")

    broken = Listing(breaks)
    broken.wait()
    assert "one by one" in caplog.text
    broken.close()


def test_a_kernel_is_made_once_however_many_ask_at_once() -> None:
    """Else the one that launches would not find what another thread has compiled."""
    kernels = listed("llama-3-8b", PORTABLE)
    fresh = Kernel(kernels.first[0].kernel.fn)
    barrier = threading.Barrier(8)
    found: list[Any] = []

    def ask() -> None:
        barrier.wait(SECONDS)
        found.append(fresh.compiled)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert len({id(one) for one in found}) == 1


def test_cuda_sources_are_compiled_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, int]] = []
    monkeypatch.setattr(
        "cellar.runtime.steps.warmup.compile_cuda", lambda source, constants: compiled.append(constants)
    )
    jobs = (CudaJob("a", (("TM", 64),)), CudaJob("b", ()))
    warmup = Warmup(Kernels((), (), jobs), target(), lambda launch: None, num_threads=1)
    warmup.wait()
    assert compiled == [{"TM": 64}, {}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_on_a_device_the_capture_compiles_nothing_that_was_not_listed() -> None:
    """Every kernel that a start launches has been compiled by then: Triton's own caches grow no more."""
    from cellar.core.config import DeviceConfig, EngineConfig, ModelConfig
    from cellar.runtime.steps import local

    before: dict[str, int] = {}
    original = local.Warmup.wait

    def counting(self: Warmup) -> None:
        original(self)
        for later in self._later:  # they would be counted as the start's
            later.result()
        before.update(_compiled())

    patch = pytest.MonkeyPatch()
    patch.setattr(local.Warmup, "wait", counting)
    try:
        model = ModelConfig(model="llama-3.2-1b", load_format="dummy", max_model_len=2048)
        opened = local.open_local(EngineConfig(model=model, device=DeviceConfig(device="cuda")))
        after = _compiled()
        opened.runtime.close()
    finally:
        patch.undo()
    assert before
    # The copies of a step's words are not the model's.
    late = {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
    assert set(late) <= {"_copy_kernel", "_push_kernel"}, late


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "quantization", "memory"),
    [("llama-3.2-1b", None, 2.3), ("llama-3-8b", "int4", 4.0)],
    ids=["bf16", "int4"],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_on_a_device_decodes_of_a_streamed_model_compile_no_products(
    model: str, quantization: str | None, memory: float
) -> None:
    """Of as many sequences as one likes: what multiplies them was compiled while weights were placed."""
    from cellar import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "device": "cuda", "max_model_len": 256}
    options |= {
        "max_num_seqs": 40,
        "max_num_batched_tokens": 128,
        "device_memory": memory,
        "quantization": quantization,
    }
    with LLM(model, **options, skip_tokenizer_init=True) as llm:
        assert llm.offload is not None
        before = _compiled()
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for count in (1, 7, 19, 40):
            llm.generate([[5 + k, 9, count] for k in range(count)], params, use_tqdm=False)
        after = _compiled()
    late = {
        name for name in ("_flat_kernel", "_gemv_kernel", "_tiles_kernel") if after.get(name, 0) > before.get(name, 0)
    }
    assert not late


def _compiled() -> dict[str, int]:
    """How many forms of each kernel of ours this process has compiled."""
    import gc

    from cellar.ops.triton_support import Kernel

    gc.unfreeze()  # what imports made is hidden from the collector, and from us
    found: dict[str, int] = {}
    for kernel in (k for k in gc.get_objects() if isinstance(k, Kernel) and k._compiled is not None):
        caches = kernel.compiled.device_caches
        found[kernel.__name__] = sum(len(cache[0]) for cache in caches.values())
    return found
