"""Linear layers of few tokens on a GPU, where reading the weights is all that takes time (FlashDecoding++ §4, §5).

    ImplA   m = 1         GEMV on the CUDA cores: a program owns some rows of the matrix and reads all of them
    ImplB   m = 1 .. 64   flat product: the weights are the tall operand, the tokens are padded to 8, 16, 32 or 64
    ImplC   any m         the library's GEMM
    wide    m = 33 .. 1024 on Hopper: tiles as many as multiprocessors, clusters of blocks (`hopper.py`)

Which of them runs a matrix, and in what sizes, is looked up in its `LinearChoice` (`choice.py`, `device.py`).

A program starts its weight loads before it waits for the kernel in front of it (programmatic dependent launch), because
weights depend on nothing. What is small and needed by everyone - the residual add, the norm - each program of a GEMV
computes for itself, so that a layer of one token has few launches. Figures: docs/log/linear-kernels.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.linear.choice import Flat, Fused, Gemv, Kernel, Wide
from cellar.ops.linear.hopper import wide
from cellar.ops.room import in_room
from cellar.ops.triton_support import dependent_launch, interpreted, kernel

if TYPE_CHECKING:
    import triton.language as tl


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel, arrivals: Tensor | None = None) -> Tensor:
    """x W^T + b by one kernel; a `Gemv` wants one token, a `Flat` at most 64, a `Wide` what `wide_takes`.

    x: [m, k], weight: [n, k], bias: [n] or None -> [m, n]; all of one dtype. arrivals: int32 zeros, one for each
    LEAST_FLAT_ROWS rows, that split products count in and leave zero; None: they are made.
    """
    if isinstance(kernel, Gemv):
        return _gemv(x.contiguous(), weight, bias, kernel)
    if isinstance(kernel, Flat):
        x = x.contiguous()
        done = in_room(lambda sizes: _flat(x, weight, bias, sizes, arrivals), kernel)
        return torch.nn.functional.linear(x, weight, bias) if done is None else done
    if isinstance(kernel, Wide):
        return wide(x.contiguous(), weight, bias, kernel)
    if x.is_meta:  # only listed (runtime/steps/warmup.py); torch's own way there imports its compiler, for a second
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return torch.nn.functional.linear(x, weight, bias)


def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Gemv) -> Tensor:
    n, k = weight.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    turns = -(-k // sizes.block)
    _gemv_kernel[(-(-n // sizes.rows),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        n,
        k=k,
        ROWS=sizes.rows,
        BLOCK=sizes.block,
        AHEAD=min(sizes.ahead, turns),
        HAS_BIAS=bias is not None,
        num_warps=sizes.warps,
        **dependent_launch(x),
    )
    return out


def _flat(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Flat, arrivals: Tensor | None) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    padded = max(8, _power_of_2(m))
    blocks = -(-n // sizes.rows)
    splits = sizes.splits
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    counters = out
    if splits > 1:
        counters = torch.zeros(blocks, dtype=torch.int32, device=x.device) if arrivals is None else arrivals
    partial = torch.empty(splits * blocks * sizes.rows * padded if splits > 1 else 1, device=x.device)
    _flat_kernel[blocks, splits](
        x,
        weight,
        x if bias is None else bias,
        out,
        partial,
        counters,
        m,
        n,
        k=k,
        BN=sizes.rows,
        BK=sizes.depth,
        MP=padded,
        SPLITS=splits,
        STAGES=sizes.stages,
        HAS_BIAS=bias is not None,
        UPCAST=interpreted(x),
        num_warps=sizes.warps,
        **dependent_launch(x),
    )
    return out


def norm_gemv(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Fused,
    *,
    gate: bool,
) -> tuple[Tensor, Tensor]:
    """One token through residual add, RMSNorm and a matrix (and SiLU gate): -> (product, residual + delta).

    residual, delta: [1, k]; norm: [k]; weight: [n, k], or [2 n, k] with the gate's rows above the others'.
    """
    k = residual.shape[1]
    n = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty((1, n), dtype=residual.dtype, device=residual.device)
    total = residual if delta is None else residual.new_empty(residual.shape)
    _norm_gemv_kernel[(-(-n // sizes.rows),)](
        residual,
        residual if delta is None else delta,
        norm,
        weight,
        residual if bias is None else bias,
        out,
        total,
        n,
        eps,
        k=k,
        ROWS=sizes.rows,
        BLOCK=_power_of_2(k),
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        GATED=gate,
        num_warps=sizes.warps,
        **dependent_launch(residual),
    )
    return out, total


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


@kernel
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x,  # [k]
    w,  # [n, k]
    bias,  # [n]
    out,  # [n]
    n,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i] = sum_k w[i, k] x[k] + bias[i]; the first AHEAD blocks of the rows are requested before the wait."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    columns = tl.arange(0, BLOCK)
    base = w + rows[:, None].to(tl.int64) * k
    BLOCKS: tl.constexpr = (k + BLOCK - 1) // BLOCK
    ahead = ()
    for b in tl.static_range(AHEAD):
        here = columns + b * BLOCK
        mask = inside[:, None] & (here < k)[None, :]
        ahead = ahead + (  # type: ignore[assignment]  # noqa: RUF005
            tl.load(base + here[None, :], mask=mask, other=0.0, eviction_policy="evict_first"),
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for b in tl.static_range(AHEAD):
        here = columns + b * BLOCK
        xs = tl.load(x + here, mask=here < k, other=0.0).to(tl.float32)
        acc += ahead[b].to(tl.float32) * xs[None, :]
    for b in range(AHEAD, BLOCKS):
        here = columns + b * BLOCK
        mask = inside[:, None] & (here < k)[None, :]
        ws = tl.load(base + here[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        xs = tl.load(x + here, mask=here < k, other=0.0).to(tl.float32)
        acc += ws.to(tl.float32) * xs[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@kernel
def _norm_gemv_kernel(  # type: ignore[no-untyped-def]
    residual,  # [k]
    delta,  # [k]
    norm,  # [k]
    w,  # [n, k], or [2 n, k] if GATED
    bias,  # [n] or [2 n]
    out,  # [n]
    summed,  # [k]: residual + delta
    n,
    eps,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = residual + delta; out = w (h / rms(h) * norm) + bias, or silu of the upper rows' times the lower rows'."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    columns = tl.arange(0, BLOCK)
    mask = inside[:, None] & (columns < k)[None, :]
    where = rows[:, None].to(tl.int64) * k + columns[None, :]
    ws = tl.load(w + where, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        ups = tl.load(w + n * k + where, mask=mask, other=0.0, eviction_policy="evict_first")
    gain = tl.load(norm + columns, mask=columns < k, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.load(residual + columns, mask=columns < k, other=0.0).to(tl.float32)
    if HAS_DELTA:
        h += tl.load(delta + columns, mask=columns < k, other=0.0).to(tl.float32)
        h = h.to(summed.dtype.element_ty).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(summed + columns, h.to(summed.dtype.element_ty), mask=columns < k)
    scale = 1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / k + eps)
    xs = ((h * scale).to(norm.dtype.element_ty) * gain).to(tl.float32)
    y = tl.sum(ws.to(tl.float32) * xs[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups.to(tl.float32) * xs[None, :], 1)
        if HAS_BIAS:
            up += tl.load(bias + n + rows, mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@kernel
def _flat_kernel(  # type: ignore[no-untyped-def]
    x,  # [m, k]
    w,  # [n, k]
    bias,  # [n]
    out,  # [m, n]
    partial,  # [splits, blocks * BN, MP] float32
    counter,  # [blocks] int32, all zero between launches
    m,
    n,
    k: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    MP: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x w^T + bias with the weights as the tall operand, m padded to MP; the last of SPLITS programs adds up."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    rows = block * BN + tl.arange(0, BN)
    tokens = tl.arange(0, MP)
    depth = tl.arange(0, BK)
    STEPS: tl.constexpr = (k + BK * SPLITS - 1) // (BK * SPLITS)
    start = part * STEPS * BK
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, MP], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        here = start + step * BK + depth
        a = tl.load(
            w + rows[:, None].to(tl.int64) * k + here[None, :],
            mask=(rows < n)[:, None] & (here < k)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        b = tl.load(
            x + tokens[None, :] * k + here[:, None], mask=(tokens < m)[None, :] & (here < k)[:, None], other=0.0
        )
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    good = (rows < n)[:, None] & (tokens < m)[None, :]
    if SPLITS > 1:
        at = block * BN * MP + tl.arange(0, BN)[:, None] * MP + tokens[None, :]
        size = tl.num_programs(0) * BN * MP
        tl.store(partial + part * size + at, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter + block, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            acc = tl.zeros([BN, MP], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(partial + other * size + at, cache_modifier=".cg")
            if HAS_BIAS:
                acc += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
            tl.store(out + tokens[None, :] * n + rows[:, None], acc.to(out.dtype.element_ty), mask=good)
            tl.store(counter + block, 0)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + tokens[None, :] * n + rows[:, None], acc.to(out.dtype.element_ty), mask=good)
