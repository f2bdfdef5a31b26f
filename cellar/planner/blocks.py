"""Block sizes of the zig-zag and the diagonal block schedule (FlexGen §A.2): the paper's closed forms.

Nothing computes with them: tests hold against them what the planner searches with (`offload.kv_growth`) and how many
sequences the admission rule (`schedule/steps/stagger.py`) lets share a pass.

Weights are swapped with one memory of `memory` bytes; no CPU attention; two bytes an element. `layer` are the bytes of
one layer's weights, `hidden` those of a token's activations, `kv` those of a token's K and V in all layers.
"""

from __future__ import annotations


def zigzag_block(memory: float, layer: float, hidden: float, kv: float, s: int, n: int) -> float:
    """bls_1 = (memory - w) / (hidden + kv (s + n)): all sequences reach their full length together."""
    return (memory - layer) / (hidden + kv * (s + n))


def diagonal_block(memory: float, layer: float, hidden: float, kv: float, s: int, n: int) -> float:
    """bls_2 = (memory - w) / (hidden + kv (2 s + n)(n - 1) / (2 n)): lengths are spread evenly over s .. s + n."""
    return (memory - layer) / (hidden + kv * (2 * s + n) * (n - 1) / (2 * n))


def diagonal_gain(s: int, n: int) -> float:
    """bls_2 / bls_1 for many tokens: (2 s + 2 n) / (2 s + n), between 1 (long prompts) and 2 (long outputs)."""
    return (2 * s + 2 * n) / (2 * s + n)
