"""The wide product's sizes that are worth timing for a shape; `probes/linear.py` times them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from cellar.core.errors import ConfigError
from cellar.ops.linear.choice import MAX_CLUSTER, MAX_SHARED, MOST_ROWS, Shape, Wide

# Numbers of tokens that are measured; those between run like the next larger one.
TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024)
MOST = 12
_MOST_STAGES = 10


def wides_for(m: int, shape: Shape, gate: bool, multiprocessors: int) -> list[Wide]:
    """The most promising sizes for `m` tokens by a matrix [n, k], the best guess first.

    What a block takes from the L2 cache decides, times how unevenly the last round of blocks fills the device.
    """
    costs = {sizes: _cost(sizes, m, shape, gate, multiprocessors) for sizes in _all(m, shape, gate, multiprocessors)}
    return sorted(costs, key=lambda sizes: (costs[sizes], sizes.rows))[:MOST]


def _all(m: int, shape: Shape, gate: bool, multiprocessors: int) -> Iterator[Wide]:
    n, k, *_ = shape
    if m > 256:
        # Tensor cores decide, not memory: large tiles.
        for tokens, rows, stages in ((128, 256, 4), (128, 224, 4), (128, 192, 5), (192, 192, 4), (192, 160, 4)):
            for sharing_rows, sharing_tokens in ((1, 1), (2, 1), (1, 2)):
                yield Wide(tokens, rows, stages, sharing_rows, sharing_tokens, 1, True)
        return
    tokens = 128 if m > 192 else next(tokens for tokens in MOST_ROWS if m <= tokens)
    down = -(-m // tokens)
    sharing_rows = 2 if down > 1 else 1
    for parts in (1,) if gate else (parts for parts in (1, 2, 4, 8) if tokens // 16 % parts == 0):
        for rows in range(16 * sharing_rows, MOST_ROWS[tokens] + 1, 16 * sharing_rows):
            blocks = -(-n // rows) * parts * down
            if not multiprocessors // 2 < blocks <= 8 * multiprocessors or k < 64 * parts:
                continue
            for sharing_tokens in (1, 2, 4):
                cluster = sharing_rows * sharing_tokens * parts
                if cluster > MAX_CLUSTER:
                    continue
                persistent = blocks > _at_once(cluster, multiprocessors) and parts == 1
                one_stage = Wide(tokens, rows, 1, sharing_rows, sharing_tokens, parts, persistent)
                if (fitting := _fitting(one_stage)) is not None:
                    yield fitting


def _at_once(cluster: int, multiprocessors: int) -> int:
    """Blocks that run at once, about: clusters lie within parts of the device, where some multiprocessors are left."""
    left = {4: 0.06, 8: 0.09}.get(cluster, 0.0)
    return int(multiprocessors * (1 - left)) // cluster * cluster


def _fitting(sizes: Wide) -> Wide | None:
    """With as many stages as fit, of three or more."""
    for stages in range(min(_MOST_STAGES, MAX_SHARED // ((sizes.tokens + sizes.rows) * 128)), 2, -1):
        with suppress(ConfigError):
            return replace(sizes, stages=stages)
    return None


def _cost(sizes: Wide, m: int, shape: Shape, gate: bool, multiprocessors: int) -> float:
    """Bytes that the busiest multiprocessor takes in, and a little for the sums of parts."""
    n, k, *_ = shape
    down = -(-m // sizes.tokens)
    blocks = -(-n // sizes.rows) * sizes.parts * down
    rounds = -(-blocks // _at_once(sizes.cluster, multiprocessors))
    loaded = (sizes.tokens / sizes.sharing_tokens + sizes.rows / sizes.sharing_rows) * 2 * k / sizes.parts
    added = sizes.tokens * sizes.rows * 4 if sizes.parts > 1 else 0
    return rounds * (loaded + added)
