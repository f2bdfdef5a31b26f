"""Storage: what a tier below the device is asked for. Chunks are bytes; what they mean is the arena's business.

A chunk outside the device has the layout [layer][K/V][KV head][token][head_dim], one layer group after another,
whatever the arena's own is: so a chunk is one piece for every tier and every process.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Storage(Protocol):
    """`num_slots` chunks of `chunk_nbytes` bytes. One thread calls it."""

    @property
    def num_slots(self) -> int:
        """Chunks that it holds."""

    def write(self, slot: int, chunk: Bytes) -> None:
        """Keep a chunk [chunk_nbytes]. Raises OSError if it could not."""

    def read(self, slot: int, chunk: Bytes) -> None:
        """Fill `chunk` [chunk_nbytes]. Raises OSError if what was written is not there any more, or not as it was."""

    def close(self) -> None:
        """Let go of everything; what is to outlive the process is safe by then."""
