"""Kernels of recurrent cells, compiled for a GPU on a machine without one; limits of the public functions."""

from __future__ import annotations

import pytest
import torch

from cellar.core.errors import ConfigError
from cellar.ops.recurrent import join_rows, lstm_gates
from cellar.ops.recurrent import triton as recurrent
from cellar.ops.triton_support import Kernel, triton_available

POINTERS = {"finite": "*u8"}
POINTERS |= dict.fromkeys(("c_index", "h_index", "h_rows", "c_rows", "index0", "index1", "index2", "index3"), "*i64")


@pytest.mark.parametrize("name", ["_join_kernel", "_lstm_kernel", "_gru_kernel", "_tree_kernel"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiles_for_a_gpu_with_wide_loads(name: str, dtype: str) -> None:
    assert triton_available(), "the kernels of this machine's tests need Triton; install the package triton"
    kernel: Kernel = getattr(recurrent, name)
    tables = {
        "gates",
        "forget",
        "x_gates",
        "h_gates",
        "h",
        "c",
        "h_out",
        "c_out",
        "out",
        "bias",
        "x_bias",
        "h_bias",
        "forget_bias",
    }
    signature = {}
    for argument in kernel.compiled.arg_names:
        if argument == "BLOCK" or argument.endswith("BIAS"):
            continue
        if argument in POINTERS:
            signature[argument] = POINTERS[argument]
        elif argument in tables or (argument.startswith("table") and name == "_join_kernel"):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "i32"
    flags = {argument: True for argument in kernel.compiled.arg_names if argument.endswith("BIAS")}
    compiled = kernel.compile_for(90, signature, {"BLOCK": 1024, **flags}, aligned=set(signature))
    assert ".local" not in compiled.asm["ptx"]
    assert "ld.global.v4" in compiled.asm["ptx"], "rows are to be read 16 bytes at a time"


def test_a_row_that_overflows_is_not_finite() -> None:
    """An infinite c under a finite h: f is one, and c was nearly the largest number."""
    gates = torch.full((2, 4 * 8), 100.0)
    bank = torch.zeros(6, 8)
    bank[0] = torch.inf
    index = torch.arange(2)
    finite = lstm_gates(gates, bank, index, bank, index + 2, bank, index + 4)
    assert finite.tolist() == [False, True]
    assert bank[2:4].isfinite().all()


def test_more_tables_than_a_kernel_takes_are_refused() -> None:
    table, index = torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)
    for tables, indices in (([], []), ([table] * 5, [index] * 5), ([table], [index] * 2)):
        with pytest.raises(ConfigError, match="one to 4 tables"):
            join_rows(tables, indices)
