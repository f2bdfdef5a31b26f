"""Rotary position embedding (Su et al., arXiv 2104.09864), rotating halves as Hugging Face's checkpoints expect.

Frequencies are scaled as the checkpoint asks: llama3, linear, YaRN, or NTK with a base fixed once by the longest
context, so that a cached key stays true however long its sequence grows. All tables are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.specs import RopeSpec
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl


def rope_table(spec: RopeSpec, device: torch.device | str) -> Tensor:
    """cos and sin of every position: float32 [max_position, rotary_dim], cosines in the first half of the columns.

    YaRN's attention factor is folded in.
    """
    angles = torch.outer(torch.arange(spec.max_position, dtype=torch.float32), inverse_frequencies(spec))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * attention_factor(spec)).to(device)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [rotary_dim / 2], on the CPU.

    Raises ConfigError for a kind that is not known.
    """
    if spec.kind not in _FREQUENCIES:
        raise ConfigError(f"rotary embedding {spec.kind!r} is not supported; supported are {', '.join(_FREQUENCIES)}.")
    return _FREQUENCIES[spec.kind](spec)


def attention_factor(spec: RopeSpec) -> float:
    """YaRN's factor on cosines and sines (arXiv 2309.00071, eq. 22: 0.1 ln(s) + 1 unless given); 1 for other kinds."""
    if spec.kind != "yarn":
        return 1.0
    given = spec.scaling.get("attention_factor")
    if given is not None:
        return given
    factor = spec.scaling["factor"]
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(spec: RopeSpec, theta: float | None = None) -> Tensor:
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / ((spec.theta if theta is None else theta) ** exponent)


def _linear(spec: RopeSpec) -> Tensor:
    """Position interpolation (Chen et al., arXiv 2306.15595)."""
    return _plain(spec) / spec.scaling["factor"]


def _dynamic(spec: RopeSpec) -> Tensor:
    """NTK-aware scaling: the base that fits `max_position`, not the length of each sequence."""
    original = spec.scaling["original_max_position_embeddings"]
    stretch = spec.scaling["factor"] * max(spec.max_position / original, 1.0) - (spec.scaling["factor"] - 1.0)
    return _plain(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(spec: RopeSpec) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    scaling = spec.scaling
    frequencies = _plain(spec)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies


def _yarn(spec: RopeSpec) -> Tensor:
    """NTK by parts (YaRN, arXiv 2309.00071, §3.2): a ramp over dimensions between beta_fast and beta_slow turns."""
    scaling = spec.scaling
    original = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that makes `turns` full turns within the original context."""
        return spec.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.get("beta_fast", 32.0)), dimension(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = _plain(spec)
    return frequencies / scaling["factor"] * stretched + frequencies * (1 - stretched)


_FREQUENCIES: dict[str, Callable[[RopeSpec], Tensor]] = {
    "plain": _plain,
    "llama3": _llama3,
    "linear": _linear,
    "yarn": _yarn,
    "dynamic": _dynamic,
}


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    With (a, b) the halves of the first rotary_dim dimensions of a head: (a cos - b sin, b cos + a sin); dimensions
    beyond stay. q: [t, h, D], k: [t, hk, D], any strides; positions: int64 [t]; cos_sin: float32
    [max_position, rotary_dim] from `rope_table`. -> like q and k.
    """
    if q.is_cuda:
        return rotary_kernel(q, k, positions, cos_sin)
    return rotary_definition(q, k, positions, cos_sin)


def rotary_definition(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation in plain torch, in float32; queries and keys go through it together."""
    x = torch.cat((q, k), dim=1).float()
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    out = out.to(q.dtype)
    return out[:, : q.shape[1]], out[:, q.shape[1] :]


def rotary_kernel(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation in Triton: a program turns a block of heads of one token; queries and keys in one launch."""
    t, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    block_dim = 1 << max(0, dim - 1).bit_length()
    block_heads = max(1, 2048 // block_dim)
    if t:
        _rotary_kernel[t, -(-(heads + kv_heads) // block_heads)](
            q,
            k,
            positions,
            cos_sin,
            out_q,
            out_k,
            heads,
            kv_heads,
            dim,
            cos_sin.shape[1],
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEADS=block_heads,
            DIM=block_dim,
        )
    return out_q, out_k


@kernel
def _rotary_kernel(  # type: ignore[no-untyped-def]
    q,  # [t, heads, dim]
    k,  # [t, kv_heads, dim]
    positions,  # [t]
    cos_sin,  # [max_position, rotary_dim]
    out_q,  # [t, heads, dim], contiguous
    out_k,  # [t, kv_heads, dim], contiguous
    heads,
    kv_heads,
    dim,
    rotary_dim,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    half = rotary_dim // 2
    turns = d < rotary_dim
    # Dimension d turns with its partner half a rotary_dim away, which enters with a minus in the first half.
    partner = tl.where(d < half, d + half, d - half)
    partner = tl.where(turns, partner, d)
    row = cos_sin + tl.load(positions + token) * rotary_dim
    pair = tl.where(d < half, d, d - half)
    cos = tl.load(row + pair, mask=turns, other=1.0)
    sin = tl.load(row + half + pair, mask=turns, other=0.0)
    sin = tl.where(d < half, -sin, sin)

    is_q = (head < heads)[:, None] & (d < dim)[None, :]
    at_q = q + token * stride_q_token + head[:, None] * stride_q_head
    x = tl.load(at_q + d[None, :], mask=is_q, other=0.0).to(tl.float32)
    y = tl.load(at_q + partner[None, :], mask=is_q, other=0.0).to(tl.float32)
    turned = x * cos[None, :] + y * sin[None, :]
    tl.store(out_q + (token * heads + head[:, None]) * dim + d[None, :], turned.to(out_q.dtype.element_ty), mask=is_q)

    other = head - heads
    is_k = ((other >= 0) & (other < kv_heads))[:, None] & (d < dim)[None, :]
    at_k = k + token * stride_k_token + other[:, None] * stride_k_head
    x = tl.load(at_k + d[None, :], mask=is_k, other=0.0).to(tl.float32)
    y = tl.load(at_k + partner[None, :], mask=is_k, other=0.0).to(tl.float32)
    turned = x * cos[None, :] + y * sin[None, :]
    at = (token * kv_heads + other[:, None]) * dim + d[None, :]
    tl.store(out_k + at, turned.to(out_k.dtype.element_ty), mask=is_k)


def _case(name: str, t: int, heads: int, kv_heads: int, dim: int, rotary_dim: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(t + heads)
        qkv = torch.randn((t, (heads + 2 * kv_heads) * dim), generator=generator).to(dtype).to(device)
        vectors = qkv.view(t, heads + 2 * kv_heads, dim)
        return {
            "q": vectors[:, :heads],
            "k": vectors[:, heads : heads + kv_heads],
            "positions": torch.randint(0, 50, (t,), generator=generator).to(device),
            "cos_sin": rope_table(RopeSpec(dim, rotary_dim, 10_000.0, max_position=50), device),
        }

    return Case(name, make)


OPS = (
    Op(
        "rotary",
        rotary,
        rotary_definition,
        rotary_kernel,
        (
            _case("grouped", 3, 4, 2, 64, 64),
            _case("partial, odd dim", 2, 3, 3, 20, 12),
            _case("many heads", 1, 40, 2, 64, 64),
        ),
    ),
)
