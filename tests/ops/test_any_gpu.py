"""Every Triton kernel with every default tile, compiled for GPUs that are not here and held against their limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.kv_formats import KVFormat, row_nbytes
from cellar.ops.attention.plan import NARROW_TILE, AttentionBuffers, AttentionShape, AttentionWork, Captured
from cellar.ops.attention.triton import attention_kernel, decode_attention_kernel, launch_settings, smaller_settings
from cellar.ops.compile_jobs import CompileJob, jobs_of
from cellar.ops.linear import triton as linear_triton
from cellar.ops.linear.choice import Flat, Gemv, LinearChoice, Shape, default_choice, linear_choices
from cellar.ops.linear.definition import linear_definition
from cellar.ops.linear.triton import multiply, norm_gemv
from cellar.ops.registry import all_ops
from cellar.ops.room import Room, room_on
from cellar.ops.triton_support import Launch, noted_launches
from cellar.runtime.probes.registry import shipped

ARCHITECTURES: tuple[int | str, ...] = (80, 86, 89, 90, 120, "gfx942", "gfx1100")
SMALL: tuple[int | str, ...] = (86, 89, 120, "gfx942", "gfx1100")
SHAPES = tuple(
    Shape(n, k)
    for n, k in ((4096, 4096), (4096, 14336), (6144, 4096), (12288, 4096), (28672, 4096), (128256, 4096), (5120, 5120))
)
META = torch.device("meta")


def target_of(architecture: int | str) -> Any:
    from triton.backends.compiler import GPUTarget

    if isinstance(architecture, int):
        return GPUTarget("cuda", architecture, 32)
    return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def choices() -> list[tuple[Shape, LinearChoice]]:
    """The rules of thumb, and what the shipped profile chose: both are tried on any GPU."""
    return [(shape, default_choice(shape.n, shape.k)) for shape in SHAPES] + [
        *linear_choices(shipped("h200").tables).items()
    ]


def note_linear(room: Room) -> Iterator[Launch]:
    """Products with every default size, as `DeviceWeight` cuts them to the device."""
    seen = set()
    for shape, choice in choices():
        n, k = shape.n, shape.k
        fitting = choice.fitting(room)
        for m, kernel in zip(fitting.tokens, fitting.kernels, strict=True):
            # K is a constant of the kernel, but no size depends on it.
            key = (kernel, max(8, m) if isinstance(kernel, Flat) else m)
            if kernel is None or key in seen:
                continue
            seen.add(key)
            with noted_launches() as notes:
                multiply(empty(m, k), empty(n, k), None, kernel)
            yield from notes
    for k in (4096, 8192):
        fused = default_choice(4096, k).fused
        assert fused is not None
        for gate in (False, True):
            with noted_launches() as notes:
                norm_gemv(empty(1, k), empty(1, k), empty(k), 1e-5, empty(8192, k), None, fused, gate=gate)
            yield from notes


ATTENTION = [
    (torch.bfloat16, 128, NARROW_TILE, False),
    (torch.bfloat16, 128, 128, False),
    (torch.float16, 64, 64, False),
    (torch.bfloat16, 256, 64, False),
    (torch.float32, 128, 64, False),
]


def note_attention(
    architecture: int | str,
    dtype: torch.dtype,
    dim: int,
    tile: int,
    many: bool,
    patch: pytest.MonkeyPatch,
    kv_format: KVFormat = "plain",
) -> list[Launch]:
    """A graph's launch of one class of tiles."""
    patch.setattr("cellar.ops.attention.triton.room_of", lambda device: room_on(architecture))
    patch.setattr("cellar.ops.attention.triton.takes_ptx", lambda x: isinstance(architecture, int))
    shape = AttentionShape(8, 2, dim, 32, None, kv_format)
    buffers = AttentionBuffers(64, 64, 64, shape, META, depth=1)
    count, none = 100 if many else 1, np.zeros(0, np.int32)
    captured = Captured(count) if tile == NARROW_TILE else Captured(0, count, tile)
    work = AttentionWork(shape, none, none, none, np.zeros(1, np.int32), META, 8, buffers=buffers, captured=captured)
    q, new, cache = empty(4, 8, dim, dtype=dtype), empty(4, 2, dim, dtype=dtype), empty(9, 2, 32, dim, dtype=dtype)
    table = empty(4, 4, dtype=torch.int32)
    if kv_format != "plain":
        element = torch.float8_e4m3fn if kv_format == "fp8" else torch.uint8
        cache = empty(9, 2, 32, row_nbytes(kv_format, dim), dtype=element)
    with noted_launches() as notes:
        if tile == NARROW_TILE and kv_format == "plain":
            angles = empty(4, dim, dtype=torch.float32)
            decode_attention_kernel(q, new, new, angles, cache, cache, table, work, 1.0)
        else:
            attention_kernel(q, cache, cache, table, work, 1.0)
    return notes


def note_others(architecture: int | str, patch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Every operation's first case, heavy ones too; attention and products have more of their own."""
    patch.setattr("cellar.ops.sampling.triton.room_of", lambda device: room_on(architecture))
    for op in (entry.op for entry in all_ops()):
        if "attention" in op.name or "linear" in op.name:
            continue
        for variant in op.variants:
            if variant.name == "triton":
                with noted_launches() as notes:
                    variant.function(**op.cases[-1].make(META, torch.bfloat16))
                assert notes, f"{op.name} launches nothing on meta tensors"
                yield from notes
    # A real vocabulary has the largest block.
    choose = next(entry.op for entry in all_ops() if entry.op.name == "choose")
    arguments = choose.cases[-1].make(META, torch.bfloat16) | {"logits": empty(6, 128_256)}
    with noted_launches() as notes:
        next(v for v in choose.variants if v.name == "triton").function(**arguments)
    yield from notes


def check(job: CompileJob, architecture: int | str) -> None:
    compiled = job.compile()
    room = room_on(architecture)
    assert compiled.metadata.shared <= room.shared, f"{job.key}: {compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.num_warps <= room.warps, f"{job.key}: {compiled.metadata.num_warps} warps"


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_product_compiles_and_fits(architecture: int | str) -> None:
    jobs = jobs_of(note_linear(room_on(architecture)), target_of(architecture))
    assert len(jobs) > 10
    for job in jobs:
        check(job, architecture)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "dim", "tile", "many"), ATTENTION)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_compiles_and_fits(
    architecture: int | str, dtype: torch.dtype, dim: int, tile: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(note_attention(architecture, dtype, dim, tile, many, monkeypatch), target_of(architecture))
    check(job, architecture)


QUANTIZED_ATTENTION: list[tuple[torch.dtype, int, int, KVFormat]] = [
    (torch.bfloat16, 128, NARROW_TILE, "fp8"),
    (torch.bfloat16, 128, 128, "fp8"),
    (torch.float16, 64, 64, "fp8"),
    (torch.bfloat16, 80, NARROW_TILE, "int4"),
    (torch.bfloat16, 128, 64, "int4"),
]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "dim", "tile", "kv_format"), QUANTIZED_ATTENTION)
@pytest.mark.parametrize("architecture", [80, 90, "gfx942"])
def test_attention_over_quantized_kv_compiles_and_fits(
    architecture: int | str,
    dtype: torch.dtype,
    dim: int,
    tile: int,
    kv_format: KVFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = note_attention(architecture, dtype, dim, tile, False, monkeypatch, kv_format)
    (job,) = jobs_of(notes, target_of(architecture))
    check(job, architecture)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_other_operation_compiles_and_fits(architecture: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(note_others(architecture, monkeypatch), target_of(architecture))
    assert len(jobs) > 12
    for job in jobs:
        check(job, architecture)


@pytest.mark.parametrize("architecture", [89, "gfx942"])
def test_the_product_that_asked_128_kib_fits(architecture: int | str) -> None:
    """6144 x 4096 at 33 to 64 tokens: 99 KiB is all that an RTX 4090, L4, A10 or 5090 has, an MI300 has 64."""
    x, weight = empty(64, 4096), empty(6144, 4096)
    kernel = default_choice(6144, 4096).fitting(room_on(architecture)).at(64)
    with noted_launches() as notes:
        multiply(x, weight, None, kernel)
    (job,) = jobs_of(notes, target_of(architecture))
    check(job, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_default_size_is_estimated_beyond_the_device(architecture: int | str) -> None:
    room = room_on(architecture)
    for _, choice in choices():
        fitting = choice.fitting(room)
        for m, before, after in zip(choice.tokens, choice.kernels, fitting.kernels, strict=True):
            if isinstance(before, Flat):
                assert isinstance(after, Flat), f"{before} has a smaller form"
                assert after.shared(m, room) <= room.shared
                if before.shared(m, room) <= room.shared:
                    assert after == before, "what fits stays as it was measured"
            else:
                assert after == before


@pytest.mark.parametrize("architecture", SMALL)
def test_prompts_take_fewer_stages_on_small_devices_and_hoppers_stay(architecture: int | str) -> None:
    small, hopper = (launch_settings(128, 128, 2, room=room_on(a)) for a in (architecture, 90))
    assert small["num_stages"] == small["STAGES"] < hopper["STAGES"] == 3
    assert launch_settings(NARROW_TILE, 128, 2, room=room_on(90))["TURN"] == 64


def test_smaller_sizes_come_to_an_end() -> None:
    flat: Flat | None = Flat(64, 128, 5, 2)
    tried = []
    while flat is not None:
        tried.append((flat.stages, flat.depth))
        flat = flat.smaller()
    assert tried == [(5, 128), (4, 128), (3, 128), (2, 128), (2, 64), (2, 32)]
    settings: dict[str, Any] | None = launch_settings(64, 128, 2)
    turns = []
    while settings is not None:
        turns.append((settings["STAGES"], settings["TURN"]))
        settings = smaller_settings(settings)
    assert turns == [(3, 64), (2, 64), (1, 64), (1, 32), (1, 16)]


class Refusing:
    """A kernel of a device that has room for so many stages only."""

    def __init__(self, kernel: Any, name: str, most: int) -> None:
        self.kernel, self.name, self.most = kernel, name, most
        self.tried: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from triton.runtime.errors import OutOfResources

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.tried.append(kwargs[self.name])
            if kwargs[self.name] > self.most:
                raise OutOfResources(131_072, 101_376, "shared memory")
            return self.kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.parametrize(("most", "tried"), [(3, [5, 4, 3]), (0, [5, 4, 3, 2, 2, 2])])
def test_a_product_that_the_device_refuses_is_computed_all_the_same(
    most: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In smaller sizes; where it refuses all of them, by the library."""
    refusing = Refusing(linear_triton._flat_kernel, "STAGES", most)
    monkeypatch.setattr(linear_triton, "_flat_kernel", refusing)
    x, weight = torch.randn(5, 256), torch.randn(64, 256)
    got = multiply(x, weight, None, Flat(32, 128, 5, 1))
    assert refusing.tried == tried
    torch.testing.assert_close(got, linear_definition(x, weight), atol=1e-4, rtol=1e-4)


def test_attention_that_the_device_refuses_takes_smaller_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from cellar.ops.attention import triton as attention_triton

    op = next(entry.op for entry in all_ops() if entry.op.name == "attention")
    case = next(case for case in op.cases if case.name == "prompt")
    expected = op.definition(**case.make(torch.device("cpu"), torch.float16))
    refusing = Refusing(attention_triton._attention_kernel, "STAGES", 1)
    monkeypatch.setattr(attention_triton, "_attention_kernel", refusing)
    got = attention_kernel(**case.make(torch.device("cpu"), torch.float16))
    assert refusing.tried == [3, 2, 1]
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=4e-3)


def test_what_else_goes_wrong_in_a_launch_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(linear_triton, "_flat_kernel", Broken())
    with pytest.raises(RuntimeError, match="illegal"):
        multiply(torch.randn(5, 256), torch.randn(64, 256), None, Flat(32, 128, 5, 1))


def test_a_gemv_asks_for_no_shared_memory_worth_a_look() -> None:
    """Only flat products and attention are cut: the rest stays below the smallest device."""
    (job,) = jobs_of(_gemv_launch(), target_of(89))
    assert job.compile().metadata.shared < 8192


def _gemv_launch() -> list[Launch]:
    with noted_launches() as notes:
        multiply(empty(1, 4096), empty(4096, 4096), None, Gemv(2, 2048, 1, 4))
    return notes
