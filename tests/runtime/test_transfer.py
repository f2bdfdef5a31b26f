"""The way small arrays go to an accelerator, tried on the CPU: one packed buffer, and a table beside its mirror."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.ops.attention import plan_attention
from cellar.ops.attention.plan import HEADER, ITEM_FIELDS
from cellar.runtime.steps.executor import StepExecutor
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.transfer import packed_uploader, to_host, uploader
from tests.runtime.steps.steps import run, runtime_of, story, tiny_model, tokens_of

CPU = torch.device("cpu")
PACKED = packed_uploader(CPU, pin_memory=False)


@pytest.mark.parametrize("upload", [uploader(CPU), PACKED], ids=["shared", "packed"])
def test_arrays_arrive_as_they_are(upload: Any) -> None:
    arrays = [
        np.arange(5),
        np.empty(0, np.int64),
        np.array([[1.5, 2.5, 3.5]], np.float32),
        np.array([True, False, True]),
        np.arange(12, dtype=np.int32).reshape(3, 4),
        np.empty((0, 4), np.int32),
    ]
    for array, tensor in zip(arrays, upload(arrays), strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert upload([]) == []


def test_packed_arrays_are_one_buffer_that_outlives_what_it_came_from() -> None:
    source = np.arange(7)
    strided = np.arange(20).reshape(4, 5)[:, 2]
    one, two = PACKED([source, strided])
    source[:] = -1
    assert one.tolist() == list(range(7))
    assert two.tolist() == [2, 7, 12, 17]
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_a_tensor_of_the_cpu_is_on_the_host_already() -> None:
    tensor = torch.ones(3)
    assert to_host(tensor) is tensor


def test_an_executor_with_one_copy_per_step_gives_the_same_results() -> None:
    """Everything that an accelerator's executor does, but for the device: packed uploads and a mirrored table."""
    model, weights = tiny_model()
    uploads: list[int] = []

    def counted(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        uploads.append(len(arrays))
        return PACKED(arrays)

    executor = StepExecutor(model, weights, num_slots=32, num_rows=8, device=CPU, upload=counted, mirrored=True)
    with torch.inference_mode():
        found = [executor.launch(step.plan(), MaskBox())() for step in story()]
    runtime = runtime_of(model, weights)
    wanted = run(runtime, *story())
    runtime.close()
    for got, want in zip(found, wanted, strict=True):
        assert tokens_of(got) == tokens_of(want)
        assert got.flags.tolist() == want.flags.tolist()
        assert got.prompt_logprobs.keys() == want.prompt_logprobs.keys()
        if want.logprobs is not None:
            assert got.logprobs is not None
            np.testing.assert_allclose(got.logprobs.top_logprobs, want.logprobs.top_logprobs, atol=1e-5)
    # One per step, and one for the tokens that the row with penalties brings.
    assert len(uploads) == len(found) + 1
    rows = executor.rows
    assert rows.table.data_ptr() != rows.table_host.ctypes.data
    np.testing.assert_array_equal(rows.table.numpy(), rows.table_host)


@pytest.mark.gpu
def test_small_arrays_do_not_stand_behind_a_load_in_the_copy_engine() -> None:
    """4 GiB on their way in another queue (80 ms of a link of 50 GB/s), asked for in pieces as a load's chunks are."""
    device = torch.device("cuda", 0)
    upload = uploader(device)
    planned = partial(plan_attention, heads=32, kv_heads=8, head_dim=128, chunk_size=32, device=device, upload=upload)
    (warm,) = upload([np.arange(3)])
    assert warm.tolist() == [0, 1, 2]
    planned([0], [8192], [8704])
    here = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        for _ in range(16):
            for at in range(0, 2**28, 2**24):
                there[at : at + 2**24].copy_(here[at : at + 2**24], non_blocking=True)
        loaded: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        loaded.record()
    for turn in range(20):  # blocks of pinned memory come back while kernels of others read theirs
        numbers, flags = upload([np.arange(turn, turn + 5000), np.array([turn % 2 == 0])])
        assert numbers.tolist() == list(range(turn, turn + 5000))
        assert flags.tolist() == [turn % 2 == 0]
    assert not loaded.query(), "the load had ended before, or was waited for"
    # And so do a step's attention work lists.
    found = [planned([0], [8192 + turn], [8704]) for turn in range(5)]
    for work in found:
        there = work.resident.meta[HEADER:].view(-1, ITEM_FIELDS)
        np.testing.assert_array_equal(there.cpu().numpy(), work.items.table)
    assert not loaded.query(), "the load had ended before, or was waited for"
    torch.cuda.synchronize(device)  # or who is given this memory next has it written over
