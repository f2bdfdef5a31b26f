"""Storage: what a tier below the device is asked for. Chunks are bytes; what they mean is the arena's business.

A chunk outside the device has the layout [layer][K/V][KV head][token][head_dim], one layer group after another,
whatever the arena's own is: so a chunk is one piece for every tier and every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import ChunkLabel, KeptChunk

Bytes = NDArray[np.uint8]


class Storage(Protocol):
    """`num_slots` chunks of `chunk_nbytes` bytes. Several threads call it, each for other slots."""

    @property
    def num_slots(self) -> int:
        """Chunks that it holds."""

    @property
    def num_threads(self) -> int:
        """Threads that it pays to copy with at a time."""

    def kept(self) -> Sequence[KeptChunk]:
        """Chunks from before this process, in slots of their own."""

    def write(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Keep a chunk [chunk_nbytes]; a tier that outlives the process needs its label. Raises OSError if it could
        not; the slot holds nothing then.
        """

    def read(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Fill `chunk` [chunk_nbytes]. Raises OSError if what was written is not there any more, or not as it was."""

    def erase(self, slot: int) -> None:
        """Nothing of what was written is ever found again. Raises OSError if that could not be done."""

    def close(self) -> None:
        """Let go of everything; what is to outlive the process is safe by then."""


@runtime_checkable
class DistantStorage(Storage, Protocol):
    """A tier to which every exchange costs a round trip: it takes several chunks with one.

    `chunks` is [n, chunk_nbytes]; each answers why a chunk was not written, read or erased, None: it was.
    """

    def write_many(
        self, slots: Sequence[int], chunks: Bytes, labels: Sequence[ChunkLabel | None]
    ) -> Sequence[OSError | None]:
        """`write` for several."""

    def read_many(
        self, slots: Sequence[int], chunks: Bytes, labels: Sequence[ChunkLabel | None]
    ) -> Sequence[OSError | None]:
        """`read` for several."""

    def erase_many(self, slots: Sequence[int]) -> Sequence[OSError | None]:
        """`erase` for several."""
