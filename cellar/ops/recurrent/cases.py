"""Example calls of recurrent cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cellar.ops.registry import Case


def _rows(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _index(seed: int, device: torch.device, rows: int, count: int) -> Tensor:
    """Different rows, so that none is written twice."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:count].to(device)


def _join_case(widths: tuple[int, ...], count: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "tables": [_rows(k, device, dtype, 9, width) for k, width in enumerate(widths)],
            "indices": [_index(k, device, 9, count) for k in range(len(widths))],
        }

    return Case(f"{count} rows of {' and '.join(map(str, widths))}", make)


def _lstm_case(name: str, hidden: int, count: int, broken: bool = False, biased: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        gates = _rows(0, device, dtype, count, 4 * hidden)
        if broken:
            gates[1, 3] = torch.nan
        # States lie in one table, as a bank has them: two old ones a row, then two new ones.
        bank = _rows(1, device, dtype, 44, hidden)
        places = _index(2, device, 11, count) * 4
        return {
            "gates": gates,
            "c": bank,
            "c_index": places + 1,
            "h_out": bank,
            "h_rows": places + 2,
            "c_out": bank,
            "c_rows": places + 3,
            "bias": _rows(3, device, dtype, 4 * hidden) if biased else None,
        }

    return Case(name, make)


def _gru_case(hidden: int, count: int, biased: str = "") -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "x_gates": _rows(0, device, dtype, count, 3 * hidden),
            "h_gates": _rows(1, device, dtype, count, 3 * hidden),
            "h": _rows(2, device, dtype, 11, hidden),
            "h_index": _index(3, device, 11, count),
            "h_out": _rows(4, device, dtype, 11, hidden),
            "h_rows": _index(5, device, 11, count),
            "x_bias": _rows(6, device, dtype, 3 * hidden) if "x" in biased else None,
            "h_bias": _rows(7, device, dtype, 3 * hidden) if "h" in biased else None,
        }

    return Case(f"{count} rows of {hidden}{', biases of ' * bool(biased)}{biased}", make)


def _tree_case(hidden: int, count: int, children: int, biased: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        together = _rows(0, device, dtype, count, (3 + children) * hidden)
        bias = _rows(7, device, dtype, (3 + children) * hidden)
        return {
            # As one matrix product leaves them.
            "gates": together[:, : 3 * hidden],
            "forget": together[:, 3 * hidden :],
            "c": _rows(1, device, dtype, 30, hidden),
            "c_index": _index(2, device, 30, count * children).view(count, children),
            "h_out": _rows(3, device, dtype, 30, hidden),
            "h_rows": _index(4, device, 30, count),
            "c_out": _rows(5, device, dtype, 30, hidden),
            "c_rows": _index(6, device, 30, count),
            "bias": bias[: 3 * hidden] if biased else None,
            "forget_bias": bias[3 * hidden :] if biased else None,
        }

    return Case(f"{count} nodes of {children} children, {hidden} wide{', biased' * biased}", make)


JOIN_ROWS = (_join_case((20,), 3), _join_case((33, 70), 5), _join_case((8, 4, 1030), 2), _join_case((3, 5, 4, 6), 4))
LSTM_GATES = (
    _lstm_case("three rows", 20, 3),
    _lstm_case("a wide row", 1100, 1),
    _lstm_case("one row of four is broken", 33, 4, broken=True),
    _lstm_case("a bias", 33, 5, biased=True),
)
GRU_GATES = (_gru_case(20, 3), _gru_case(1030, 2), _gru_case(33, 4, "x and h"), _gru_case(20, 2, "h"))
TREE_GATES = (
    _tree_case(20, 3, 2),
    _tree_case(33, 2, 0),
    _tree_case(1030, 2, 3),
    _tree_case(33, 4, 2, biased=True),
    _tree_case(20, 2, 0, biased=True),
)
