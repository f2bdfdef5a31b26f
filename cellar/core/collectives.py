"""What a profile says of collectives among ranks: names, columns, and the bytes by which they are compared."""

from __future__ import annotations

from cellar.core.sums import sent_by_all_reduce

TABLE = "collectives"
COLUMNS = ("way", "kind", "ranks", "whole", "sent", "seconds", "fitted")
"""A row is one size: `whole` bytes of the tensor before it is cut, or once it is put together; of these a rank must
send `sent`. `fitted` 1: prices are fitted to it; 0: they are judged by it.
"""

OURS = "ranks"
"""The way of what engines run: sums in the order of ranks. The others are a library's name, and `peers`."""

PEERS = "peers"
SEND = "send"
SUM = "sum"
"""Of prices: an all-reduce as tensor parallelism by heads does it, through boxes in peers' memory. A profile has it as
the all-reduce of `OURS`.
"""


def sent_nbytes(kind: str, whole: int, ranks: int) -> int:
    """What a rank must send of so many bytes, as `planner/sharding.py` counts it."""
    if kind == SEND:
        return whole
    return sent_by_all_reduce(whole, ranks) if kind == "all-reduce" else whole * (ranks - 1) // ranks
