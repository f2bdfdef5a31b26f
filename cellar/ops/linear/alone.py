"""One token on its way into a product on Hopper: what each block of it does by itself (`alone.cuh`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.ops.cuda.driver import Argument


@dataclass(frozen=True, slots=True)
class Inside:
    """What a kernel does beside its product: norm of its only token before and rounding, or a form that keeps its bits
    (`kept` of them a number: 16 as float16, 24 as bytes); silu(gate) * up behind.
    """

    normed: bool = False
    rounded: bool = False
    gated: bool = False
    kept: int = 0

    @property
    def alone(self) -> bool:
        """True if the token goes through shared memory, so that there can be no other."""
        return self.rounded or self.kept > 0

    def shared(self, k: int, warps: int, turn: int, cluster: int = 1) -> int:
        """Bytes of shared memory that k numbers of the token take, with what is reckoned of them. Warps of a cluster
        share the columns, `turn` at a time.
        """
        if not self.kept:
            return k if self.rounded else 0
        turns = -(-k // (turn * warps * cluster)) * (cluster if self.normed else 1)
        columns = turns * warps * turn
        return _SCRATCH + columns * self.kept // 8 + (columns // _SUMMED * 4 if self.kept == 16 else 0)

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled with."""
        return {"NORMED": int(self.normed), "ROUNDED": int(self.rounded), "GATED": int(self.gated), "KEPT": self.kept}


NOTHING = Inside()

FEW_TOKENS = 8
"""Up to so many, attention is of few, too, and all of a layer asks for one division (decision 0086)."""

# Of `kept.cuh`: the fewest columns that have a sum, and bytes for an exchange among warps.
_SUMMED, _SCRATCH = 32, 128

_LEAST_ROOM, _LEAST_ROOM_OF_FEW = 64 << 10, 132 << 10


def room_of(shared: int, resident: int, *, few: bool) -> int:
    """Bytes of a multiprocessor's memory that a kernel for a few tokens asks for: `resident` blocks side by side of
    `shared` bytes each, and at least as much as the other kernels of its kind (decision 0080), which for the fewest are
    those of attention, too.
    """
    return max(_LEAST_ROOM_OF_FEW if few else _LEAST_ROOM, resident * (shared + 1024))  # 1 KB of each is the driver's


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """A token x [1, k] in 16 bits, or with a norm [k] rms_norm(x + delta) (delta [1, k]; None: nothing to add)."""

    x: Tensor
    delta: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0

    def contiguous(self) -> Alone:
        """The same, its numbers behind one another."""
        delta = None if self.delta is None else self.delta.contiguous()
        return Alone(self.x.contiguous(), delta, self.norm, self.eps)

    def total(self) -> Tensor:
        """Where x + delta goes: x itself if there is nothing to add."""
        return self.x if self.delta is None else torch.empty_like(self.x)

    def arguments(self, total: Tensor) -> tuple[Argument, ...]:
        """What stands behind a kernel's own arguments."""
        pointers = (self.delta, self.norm, total)
        return *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers), ctypes.c_float(self.eps)


NOBODY: tuple[Argument, ...] = (*(ctypes.c_void_p(0) for _ in range(3)), ctypes.c_float(0.0))
"""Those of a kernel that has nothing inside."""
