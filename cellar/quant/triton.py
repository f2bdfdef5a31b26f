"""Products with quantized matrices on a GPU: codes are read once, in their bits, and become numbers in registers.

- rows: one token, numbers in float32 on the ordinary cores; add, norm and gate can be inside
- tiles: any number of tokens on tensor cores, with matrix rows as the tall operand. Codes less their zero points are
  exact in bfloat16; sums of a group are float32 and are multiplied by its scale there. Few rows are split along K, and
  the last program to arrive adds up
- expanded: the matrix written out in the dtype of x, for products by the library

With PTX (NVIDIA, bfloat16) two codes become numbers at a time by masks that put their bits where a bfloat16 has them;
elsewhere the same is computed by operations of the language. `packed.py` says where codes lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.room import is_out_of_resources
from cellar.ops.triton_support import dependent_launch, interpreted, kernel
from cellar.quant.choice import Kernel, Rows, Tiles
from cellar.quant.packed import SYMMETRIC_ZERO, Packed

if TYPE_CHECKING:
    import triton.language as tl


# Up to so many tokens sums of a group are multiplied by its scale, beyond numbers are: rounded to the dtype of x, as the
# library's product of the expanded matrix has them.
_FEW = 16


def multiply_packed(
    x: Tensor, matrix: Packed, bias: Tensor | None, kernel: Kernel, arrivals: Tensor | None = None
) -> Tensor:
    """x W^T + b by one kernel: x: [m, k], bias: [n] or None -> [m, n] in x's dtype; None: expanded, by the library.

    arrivals: int32 zeros for `Tiles` that are split, which they leave zero; None or too few: they are made.
    """
    if isinstance(kernel, Rows):
        return _rows(x.contiguous(), None, None, 0.0, matrix, bias, kernel, gate=False)[0]
    if isinstance(kernel, Tiles):
        return _tiles_that_fit(x.contiguous(), matrix, bias, kernel, arrivals)
    return torch.nn.functional.linear(x, expanded(matrix, x.dtype), bias)


def norm_rows(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    matrix: Packed,
    bias: Tensor | None,
    sizes: Rows,
    *,
    gate: bool,
) -> tuple[Tensor, Tensor]:
    """One token through residual add, RMSNorm and a matrix (and SiLU gate): -> (product, residual + delta).

    residual, delta: [1, k]; norm: [k]; with `gate` the gate's rows lie above the others'.
    """
    return _rows(residual, delta, norm, eps, matrix, bias, sizes, gate=gate)


def expanded(matrix: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k], rounded to a dtype."""
    n, k = matrix.shape
    out = torch.empty((n, k), dtype=dtype, device=matrix.words.device)
    rows = 16
    _expand_kernel[(-(-n // rows), matrix.words.shape[0])](
        matrix.words, matrix.scales, _zeros(matrix), out, n, k=k, ROWS=rows, **_constants(matrix, out), num_warps=4
    )
    return out


def _rows(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor | None,
    eps: float,
    matrix: Packed,
    bias: Tensor | None,
    sizes: Rows,
    *,
    gate: bool,
) -> tuple[Tensor, Tensor]:
    k = matrix.shape[1]
    n = matrix.shape[0] // 2 if gate else matrix.shape[0]
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    total = x if delta is None else x.new_empty(x.shape)
    turns = -(-matrix.words.shape[0] // sizes.blocks)
    _rows_kernel[(-(-n // sizes.rows),)](
        x,
        x if delta is None else delta,
        x if norm is None else norm,
        matrix.words,
        matrix.scales,
        _zeros(matrix),
        x if bias is None else bias,
        out,
        total,
        n,
        eps,
        k=k,
        ROWS=sizes.rows,
        BLOCKS=sizes.blocks,
        AHEAD=min(sizes.ahead, turns),
        WIDTH=_power_of_2(k),
        NORM=norm is not None,
        HAS_DELTA=delta is not None,
        GATED=gate,
        HAS_BIAS=bias is not None,
        **_constants(matrix, x),
        num_warps=sizes.warps,
        **dependent_launch(x),
    )
    return out, total


def _tiles_that_fit(x: Tensor, matrix: Packed, bias: Tensor | None, sizes: Tiles, arrivals: Tensor | None) -> Tensor:
    """Tiles; smaller ones, and at last the library's product, where the device refuses these."""
    tried: Tiles | None = sizes
    while tried is not None:
        try:
            return _tiles(x, matrix, bias, tried, arrivals)
        except Exception as error:
            if not is_out_of_resources(error):
                raise
            tried = tried.smaller()
    return multiply_packed(x, matrix, bias, None)


def _tiles(x: Tensor, matrix: Packed, bias: Tensor | None, sizes: Tiles, arrivals: Tensor | None) -> Tensor:
    m, k = x.shape
    n = matrix.shape[0]
    tokens = min(sizes.tokens, max(8, _power_of_2(m)))
    across, down = -(-m // tokens), -(-n // sizes.rows)
    splits = min(sizes.splits, matrix.words.shape[0])
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    counters = out
    if splits > 1:
        enough = arrivals is not None and arrivals.numel() >= across * down
        counters = arrivals if enough else torch.zeros(across * down, dtype=torch.int32, device=x.device)  # type: ignore[assignment]
    partial = torch.empty(splits * across * down * sizes.rows * tokens if splits > 1 else 1, device=x.device)
    _tiles_kernel[across * down, splits](
        x,
        matrix.words,
        matrix.scales,
        _zeros(matrix),
        x if bias is None else bias,
        out,
        partial,
        counters,
        m,
        n,
        k=k,
        BN=sizes.rows,
        MP=tokens,
        ACROSS=across,
        SPLITS=splits,
        STAGES=sizes.stages,
        ONES=tokens <= _FEW,
        SCALED=tokens > _FEW,
        HAS_BIAS=bias is not None,
        **_constants(matrix, x),
        num_warps=sizes.warps,
        **dependent_launch(x),
    )
    return out


def _zeros(matrix: Packed) -> Tensor:
    return matrix.scales if matrix.zeros is None else matrix.zeros


def _constants(matrix: Packed, x: Tensor) -> dict[str, Any]:
    """What all kernels are compiled with."""
    return {
        "FORMAT": matrix.format.name,
        "SPAN": matrix.span,
        "PARTS": matrix.parts,
        "GROUPS": matrix.groups,
        "SHARING": max(1, matrix.format.rows),
        "HAS_ZEROS": matrix.zeros is not None,
        "UPCAST": interpreted(x),
        "PTX": x.dtype == torch.bfloat16 and has_ptx(x),
    }


def has_ptx(x: Tensor) -> bool:
    """True where a kernel that is given `x` may have instructions of NVIDIA's (sm_80 and later)."""
    if x.is_meta:
        return True  # `on_target` corrects it
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


@kernel
def _numbers(words, zero, part: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32: what the codes of a part in int16 words stand for, less their zero points (any shape that fits)."""
    bits = words.to(tl.int32) & 0xFFFF
    if FORMAT == "int4":
        found = ((bits >> (4 * part)) & 15).to(tl.float32) - zero
    elif FORMAT == "int8":
        found = ((bits << (24 - 8 * part)) >> 24).to(tl.float32) - zero
    elif FORMAT == "fp8":
        code = bits >> (8 * part)
        placed = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        found = placed.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        if part == 0:
            code = bits
        elif part == 1:
            code = bits << 3
        elif part == 2:
            code = bits << 6
        else:
            code = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0)
        placed = (code & 0x81C0) << 16
        found = placed.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return found


@kernel
def _pairs(words, zero, part: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """bfloat16: the same, two at a time. zero: bfloat16, -(128 + zero point) of int4; others have none."""
    if FORMAT == "int4":
        # 128 + code has the code as the last bits of its mantissa.
        if part == 0:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o; mov.b32 o, 0x3f803f80; lop3.b32 t, $1, 0x000f000f, 0x43004300, 0xea; "
                "fma.rn.bf16x2 $0, t, o, $2; }",
                "=r,r,r",
                [words, zero],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif part == 1:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o; mov.b32 o, 0x3f803f80; shr.u32 t, $1, 4; "
                "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, o, $2; }",
                "=r,r,r",
                [words, zero],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif part == 2:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o; mov.b32 o, 0x3f803f80; shr.u32 t, $1, 8; "
                "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, o, $2; }",
                "=r,r,r",
                [words, zero],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o; mov.b32 o, 0x3f803f80; shr.u32 t, $1, 12; "
                "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, o, $2; }",
                "=r,r,r",
                [words, zero],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    elif FORMAT == "int8":
        # 2^23 + 128 + code is a float32 whose last byte is 128 + code; what is left of the code's own float32 has 8
        # bits, so its upper half is a bfloat16.
        if part == 0:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, a, b; .reg .f32 f, g; xor.b32 t, $1, 0x80808080; "
                "prmt.b32 a, t, 0x4b000000, 0x7440; prmt.b32 b, t, 0x4b000000, 0x7442; "
                "mov.b32 f, a; mov.b32 g, b; add.f32 f, f, 0fCB000080; add.f32 g, g, 0fCB000080; "
                "mov.b32 a, f; mov.b32 b, g; prmt.b32 $0, a, b, 0x7632; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, a, b; .reg .f32 f, g; xor.b32 t, $1, 0x80808080; "
                "prmt.b32 a, t, 0x4b000000, 0x7441; prmt.b32 b, t, 0x4b000000, 0x7443; "
                "mov.b32 f, a; mov.b32 g, b; add.f32 f, f, 0fCB000080; add.f32 g, g, 0fCB000080; "
                "mov.b32 a, f; mov.b32 b, g; prmt.b32 $0, a, b, 0x7632; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    elif FORMAT == "fp8":
        # Exponents of e4m3 and bfloat16 differ by a constant, subnormal numbers included: times 2^120.
        if part == 0:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, s, o, z; mov.b32 o, 0x7b807b80; mov.b32 z, 0x80008000; "
                "shl.b32 s, $1, 8; shl.b32 t, $1, 4; and.b32 s, s, 0x80008000; "
                "lop3.b32 t, t, 0x07f007f0, s, 0xea; fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, s, o, z; mov.b32 o, 0x7b807b80; mov.b32 z, 0x80008000; "
                "shr.u32 t, $1, 4; and.b32 s, $1, 0x80008000; "
                "lop3.b32 t, t, 0x07f007f0, s, 0xea; fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    else:
        if part == 0:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, z; mov.b32 o, 0x7e807e80; mov.b32 z, 0x80008000; "
                "and.b32 t, $1, 0x81c081c0; fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif part == 1:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, z; mov.b32 o, 0x7e807e80; mov.b32 z, 0x80008000; "
                "shl.b32 t, $1, 3; and.b32 t, t, 0x81c081c0; fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif part == 2:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, o, z; mov.b32 o, 0x7e807e80; mov.b32 z, 0x80008000; "
                "shl.b32 t, $1, 6; and.b32 t, t, 0x81c081c0; fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            found = tl.inline_asm_elementwise(
                "{ .reg .b32 t, s, o, z; mov.b32 o, 0x7e807e80; mov.b32 z, 0x80008000; "
                "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000; shr.u32 s, $1, 5; "
                "lop3.b32 t, s, 0x01000100, t, 0xea; shr.u32 s, $1, 4; lop3.b32 t, s, 0x00c000c0, t, 0xea; "
                "fma.rn.bf16x2 $0, t, o, z; }",
                "=r,r",
                [words],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    return found


@kernel
def _scale(stored, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32; of mxfp4 exponents with a bias of 127."""
    if FORMAT == "mxfp4":
        exponent = stored.to(tl.int32)
        found = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        found = stored.to(tl.float32)
    return found


@kernel
def _zero_points(at, mask, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32, like `at`."""
    if HAS_ZEROS:
        found = tl.load(at, mask=mask, other=0).to(tl.float32)
    elif FORMAT == "int4":
        found = tl.where(mask, 8.0, 8.0)
    else:
        found = tl.where(mask, 0.0, 0.0)
    return found


@kernel
def _rows_kernel(  # type: ignore[no-untyped-def]
    x,  # [k]
    delta,  # [k]
    norm,  # [k]
    words,  # [blocks, n, SPAN], [blocks, 2 n, SPAN] if GATED
    scales,  # [groups, row groups]
    zeros,  # like scales
    bias,  # [n] or [2 n]
    out,  # [n]
    total,  # [k]: x + delta
    n,
    eps,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i] = sum_j W[i, j] h[j] + bias[i], h = x, or if NORM x + delta over its root mean square, times norm; if GATED
    silu of that times the same of row n + i. The words of the first AHEAD turns are requested before the wait.
    """
    COLUMNS: tl.constexpr = PARTS * SPAN
    ALL: tl.constexpr = (k + COLUMNS - 1) // COLUMNS
    TURNS: tl.constexpr = (ALL + BLOCKS - 1) // BLOCKS
    height = n
    if GATED:
        height = 2 * n
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    blocks = tl.arange(0, BLOCKS)
    inner = tl.arange(0, SPAN // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    base = words + (blocks[:, None] * height + rows[None, :])[:, :, None, None] * SPAN + inner
    ahead = ()
    ahead_up = ()
    for turn in tl.static_range(AHEAD):
        mask = ((turn * BLOCKS + blocks < ALL)[:, None] & inside[None, :])[:, :, None, None]
        there = base + (turn * BLOCKS * SPAN) * height
        ahead = ahead + (tl.load(there, mask=mask, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            up = tl.load(there + n * SPAN, mask=mask, other=0, eviction_policy="evict_first")
            ahead_up = ahead_up + (up,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rms = 1.0
    if NORM:
        columns = tl.arange(0, WIDTH)
        h = tl.load(x + columns, mask=columns < k, other=0.0).to(tl.float32)
        if HAS_DELTA:
            h += tl.load(delta + columns, mask=columns < k, other=0.0).to(tl.float32)
            h = h.to(total.dtype.element_ty).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + columns, h.to(total.dtype.element_ty), mask=columns < k)
        rms = 1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / k + eps)
    acc = tl.zeros([BLOCKS, ROWS, SPAN // 8], tl.float32)
    acc_up = tl.zeros([BLOCKS, ROWS, SPAN // 8], tl.float32)
    for turn in tl.static_range(AHEAD):
        acc = _turn(
            acc, ahead[turn], x, delta, norm, rms, scales, zeros, rows, inside, height, turn * BLOCKS,
            k, BLOCKS, NORM, HAS_DELTA, FORMAT, SPAN, PARTS, GROUPS, SHARING, HAS_ZEROS, UPCAST, PTX,
        )  # fmt: skip
        if GATED:
            acc_up = _turn(
                acc_up, ahead_up[turn], x, delta, norm, rms, scales, zeros, rows + n, inside, height, turn * BLOCKS,
                k, BLOCKS, NORM, HAS_DELTA, FORMAT, SPAN, PARTS, GROUPS, SHARING, HAS_ZEROS, UPCAST, PTX,
            )  # fmt: skip
    for turn in range(AHEAD, TURNS):
        mask = ((turn * BLOCKS + blocks < ALL)[:, None] & inside[None, :])[:, :, None, None]
        there = base + (turn * BLOCKS * SPAN) * height
        here = tl.load(there, mask=mask, other=0, eviction_policy="evict_first")
        acc = _turn(
            acc, here, x, delta, norm, rms, scales, zeros, rows, inside, height, turn * BLOCKS,
            k, BLOCKS, NORM, HAS_DELTA, FORMAT, SPAN, PARTS, GROUPS, SHARING, HAS_ZEROS, UPCAST, PTX,
        )  # fmt: skip
        if GATED:
            up = tl.load(there + n * SPAN, mask=mask, other=0, eviction_policy="evict_first")
            acc_up = _turn(
                acc_up, up, x, delta, norm, rms, scales, zeros, rows + n, inside, height, turn * BLOCKS,
                k, BLOCKS, NORM, HAS_DELTA, FORMAT, SPAN, PARTS, GROUPS, SHARING, HAS_ZEROS, UPCAST, PTX,
            )  # fmt: skip
    y = tl.sum(tl.sum(acc, 2), 0)
    if GROUPS == 0:
        y *= _scale(tl.load(scales + rows, mask=inside, other=0), FORMAT)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(tl.sum(acc_up, 2), 0)
        if GROUPS == 0:
            up *= _scale(tl.load(scales + n + rows, mask=inside, other=0), FORMAT)
        if HAS_BIAS:
            up += tl.load(bias + n + rows, mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@kernel
def _turn(  # type: ignore[no-untyped-def]
    acc, here, x, delta, norm, rms, scales, zeros, rows, inside, height, first,
    k: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr, HAS_DELTA: tl.constexpr, FORMAT: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, SHARING: tl.constexpr, HAS_ZEROS: tl.constexpr,
    UPCAST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc [BLOCKS, ROWS, SPAN / 8] and what the words `here` of blocks from `first` on add to it."""
    inner = tl.arange(0, SPAN // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    blocks = first + tl.arange(0, BLOCKS)
    for part in tl.static_range(PARTS):
        columns = (blocks * (PARTS * SPAN) + part * SPAN)[:, None, None, None] + inner
        # Every thread loads what its words meet: as a smaller tensor, x would have a layout of its own.
        columns = columns + (rows * 0)[None, :, None, None]
        xs = tl.load(x + columns, mask=columns < k, other=0.0)
        if NORM:
            h = xs.to(tl.float32)
            if HAS_DELTA:
                h += tl.load(delta + columns, mask=columns < k, other=0.0).to(tl.float32)
                h = h.to(xs.dtype).to(tl.float32)
            gain = tl.load(norm + columns, mask=columns < k, other=0.0)
            if UPCAST:
                xs = (h * rms).to(xs.dtype).to(tl.float32) * gain.to(tl.float32)
                xs = xs.to(gain.dtype)
            else:
                xs = (h * rms).to(gain.dtype) * gain
        mask = (blocks * (PARTS * SPAN) < k)[:, None] & inside[None, :]
        if GROUPS > 0:
            group = blocks * GROUPS + part * GROUPS // PARTS
            at = (group[:, None] * ((height + SHARING - 1) // SHARING)) + (rows // SHARING)[None, :]
        else:
            at = tl.where(mask, rows[None, :], rows[None, :])
        zero = _zero_points(zeros + at, mask, FORMAT, HAS_ZEROS)[:, :, None, None]
        if PTX and FORMAT == "int4":
            offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), here.shape)
            number = _pairs(here, offset, part, FORMAT).to(tl.float32)
        elif PTX and FORMAT == "mxfp4":
            number = _pairs(here, zero, part, FORMAT).to(tl.float32)
        elif PTX and FORMAT == "fp8":
            number = _pairs(here, zero, part, FORMAT).to(tl.float32)
        else:
            number = _numbers(here, zero, part, FORMAT)
        found = tl.sum(number * xs.to(tl.float32), 3)
        if GROUPS > 0:
            found *= _scale(tl.load(scales + at, mask=mask, other=0), FORMAT)[:, :, None]
        acc += found
    return acc


@kernel
def _shared(  # type: ignore[no-untyped-def]
    scales, zeros, block, rows, n,
    GROUPS: tl.constexpr, SHARING: tl.constexpr, HAS_ZEROS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Scales and zero points as they are stored, of each group of a block; without groups the zero points of rows."""
    found_scales = ()
    found_zeros = ()
    row_groups = (n + SHARING - 1) // SHARING
    for group in tl.static_range(max(1, GROUPS)):
        mask = rows < n
        at = rows // SHARING
        if GROUPS > 0:
            at = (block * GROUPS + group) * row_groups + rows // SHARING
            mask = mask & (block * GROUPS < COUNT)
            found_scales = found_scales + (tl.load(scales + at, mask=mask, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        if HAS_ZEROS:
            found_zeros = found_zeros + (tl.load(zeros + at, mask=mask, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found_scales, found_zeros


@kernel
def _tiles_kernel(  # type: ignore[no-untyped-def]
    x,  # [m, k]
    words,  # [blocks, n, SPAN]
    scales,  # [groups, row groups]
    zeros,  # like scales
    bias,  # [n]
    out,  # [m, n]
    partial,  # [SPLITS, tiles, BN, MP] float32
    counter,  # [tiles] int32, all zero between launches
    m,
    n,
    k: tl.constexpr,
    BN: tl.constexpr,
    MP: tl.constexpr,
    ACROSS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ONES: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x W^T + bias in tiles [BN rows, MP tokens], a block of columns a turn."""
    COLUMNS: tl.constexpr = PARTS * SPAN
    ALL: tl.constexpr = (k + COLUMNS - 1) // COLUMNS
    TURNS: tl.constexpr = (ALL + SPLITS - 1) // SPLITS
    EXACT: tl.constexpr = ALL * COLUMNS == k and TURNS * SPLITS == ALL
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = (tile // ACROSS) * BN + tl.arange(0, BN)
    tokens = (tile % ACROSS) * MP + tl.arange(0, MP)
    inner = tl.arange(0, SPAN)
    first = split * TURNS
    row_groups = (n + SHARING - 1) // SHARING
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, MP], tl.float32)
    # Scales and zero points are asked for a turn ahead: they are too few to go through the pipeline of the words.
    next_scales, next_zeros = _shared(
        scales, zeros, first, rows, n, 0 if SCALED else GROUPS, SHARING, HAS_ZEROS and ONES, ALL * GROUPS
    )
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        block = first + turn
        inside = rows < n
        if not EXACT:
            inside = inside & (block < ALL)
        at = words + (block * n + rows)[:, None] * SPAN + inner[None, :]
        here = tl.load(at, mask=inside[:, None], other=0)
        these_scales, these_zeros = next_scales, next_zeros
        next_scales, next_zeros = _shared(
            scales, zeros, block + 1, rows, n, 0 if SCALED else GROUPS, SHARING, HAS_ZEROS and ONES, ALL * GROUPS
        )
        part_sum = tl.zeros([BN, MP], tl.float32)
        for part in tl.static_range(PARTS):
            columns = block * COLUMNS + part * SPAN + inner
            wanted = (tokens < m)[None, :]
            if not EXACT:
                wanted = wanted & (columns < k)[:, None]
            xs = tl.load(x + tokens[None, :] * k + columns[:, None], mask=wanted, other=0.0)
            zero = 8.0 if FORMAT == "int4" else 0.0
            if HAS_ZEROS and not ONES:
                where = rows // SHARING
                if GROUPS > 0:
                    where += (block * GROUPS + part * GROUPS // PARTS) * ((n + SHARING - 1) // SHARING)
                zero = tl.load(zeros + where, mask=inside, other=0).to(tl.float32)[:, None]
            if PTX and (FORMAT != "int8" or not HAS_ZEROS or ONES):
                if HAS_ZEROS and not ONES:
                    number = _pairs(here, tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), here.shape), part, FORMAT)
                else:
                    number = _pairs(here, tl.full(here.shape, -136.0, tl.bfloat16), part, FORMAT)
            else:
                number = _numbers(here, zero, part, FORMAT)
            if SCALED and GROUPS > 0:
                where = (block * GROUPS + part * GROUPS // PARTS) * ((n + SHARING - 1) // SHARING) + rows // SHARING
                number = number.to(tl.float32) * _scale(tl.load(scales + where, mask=inside, other=0), FORMAT)[:, None]
            if UPCAST:
                xs = xs.to(tl.float32)
            else:
                number = number.to(xs.dtype)
            if GROUPS == 0 or SCALED:
                acc = tl.dot(number, xs, acc, input_precision="ieee")
            elif (part * GROUPS) % PARTS == 0:
                part_sum = tl.dot(number, xs, input_precision="ieee")
            else:
                part_sum = tl.dot(number, xs, part_sum, input_precision="ieee")
            if HAS_ZEROS and ONES:
                # As many times the sum of x as the zero point differs, which a product with ones puts where sums lie.
                ones = tl.full(here.shape, 1.0, xs.dtype)
                group_x = tl.dot(ones, xs, input_precision="ieee")
                beyond = (zero - these_zeros[part * GROUPS // PARTS].to(tl.float32))[:, None]
                if GROUPS == 0:
                    acc += beyond * group_x
                else:
                    part_sum += beyond * group_x
            if GROUPS > 0 and not SCALED:
                if ((part + 1) * GROUPS) % PARTS == 0:
                    acc += part_sum * _scale(these_scales[part * GROUPS // PARTS], FORMAT)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    good = (rows < n)[:, None] & (tokens < m)[None, :]
    done = True
    if SPLITS > 1:
        size = tl.num_programs(0) * BN * MP
        place = tile * BN * MP + tl.arange(0, BN)[:, None] * MP + tl.arange(0, MP)[None, :]
        tl.store(partial + split * size + place, acc)
        tl.debug_barrier()
        done = tl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLITS - 1
        if done:
            acc = tl.zeros([BN, MP], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(partial + other * size + place, cache_modifier=".cg")
            tl.store(counter + tile, 0)
    if done:
        if GROUPS == 0:
            acc *= _scale(tl.load(scales + rows, mask=rows < n, other=0), FORMAT)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + tokens[None, :].to(tl.int64) * n + rows[:, None], acc.to(out.dtype.element_ty), mask=good)


@kernel
def _expand_kernel(  # type: ignore[no-untyped-def]
    words,  # [blocks, n, SPAN]
    scales,  # [groups, row groups]
    zeros,  # like scales
    out,  # [n, k]
    n,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
):
    """out = W, a block of columns of some rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    inner = tl.arange(0, SPAN)
    inside = rows < n
    at = words + (block * n + rows)[:, None] * SPAN + inner[None, :]
    here = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
    for part in tl.static_range(PARTS):
        columns = block * (PARTS * SPAN) + part * SPAN + inner
        where = rows // SHARING
        if GROUPS > 0:
            where = (block * GROUPS + part * GROUPS // PARTS) * ((n + SHARING - 1) // SHARING) + rows // SHARING
        zero = _zero_points(zeros + where, inside, FORMAT, HAS_ZEROS)[:, None]
        number = _numbers(here, zero, part, FORMAT)
        number *= _scale(tl.load(scales + where, mask=inside, other=0), FORMAT)[:, None]
        mask = inside[:, None] & (columns < k)[None, :]
        tl.store(out + rows[:, None].to(tl.int64) * k + columns[None, :], number.to(out.dtype.element_ty), mask=mask)
