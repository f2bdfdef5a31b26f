"""Products with quantized matrices on a GPU: codes are read once, in their bits, and become numbers in registers.

- rows: one token, numbers in float32 on the ordinary cores; add, norm and gate can be inside
- tiles: any number of tokens on tensor cores, with matrix rows as the tall operand. Codes less their zero points are
  exact in 16 bits; sums of a group are float32 and are multiplied by its scale there. Few rows are split along K, and
  the last program to arrive adds up
- expanded: the matrix written out in the dtype of x, for products by the library

With PTX (NVIDIA, 16 bits) two codes become numbers at a time by masks that put their bits where such a number has them;
elsewhere the same is computed by operations of the language. `packed.py` says where codes lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cellar.ops.room import in_room
from cellar.ops.triton_support import dependent_launch, interpreted, kernel
from cellar.quant.choice import Kernel, Tiles
from cellar.quant.packed import Packed

if TYPE_CHECKING:
    import triton.language as tl


_RAISED = "{{ .reg .b32 t; shr.b32 t, $1, {0}; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }}"
_INT4 = (
    "{{ .reg .b32 t, one; mov.b32 one, 0x3f803f80; shr.b32 t, $1, {0}; "
    "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, one, $2; }}"
)
_INT8 = (
    "{{ .reg .b32 t, a, b; .reg .f32 f, g; xor.b32 t, $1, 0x80808080; "
    "prmt.b32 a, t, 0x4b000000, {0}; prmt.b32 b, t, 0x4b000000, {1}; mov.b32 f, a; mov.b32 g, b; "
    "add.f32 f, f, 0fCB000080; add.f32 g, g, 0fCB000080; mov.b32 a, f; mov.b32 b, g; prmt.b32 $0, a, b, 0x7632; }}"
)
_SHORT_FLOAT = "{{ .reg .b32 s, t, by, z; mov.b32 by, {0}; mov.b32 z, 0x80008000; {1} fma.rn.bf16x2 $0, t, by, z; }}"
_PAIRS = {
    # 128 + code has the code as the last bits of its mantissa; as it is, or with $2 added.
    "raised int4": tuple(_RAISED.format(4 * part) for part in range(4)),
    "int4": tuple(_INT4.format(4 * part) for part in range(4)),
    # The last byte of 2^23 + 128 + code is 128 + code; the code alone has 8 bits, the upper half of its float32.
    "int8": (_INT8.format("0x7440", "0x7442"), _INT8.format("0x7441", "0x7443")),
    # Exponents differ by a constant from those of bfloat16, subnormal numbers included: times 2^120, 2^126.
    "fp8": (
        _SHORT_FLOAT.format(
            "0x7b807b80",
            "shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 4; lop3.b32 t, t, 0x07f007f0, s, 0xea;",
        ),
        _SHORT_FLOAT.format(
            "0x7b807b80", "and.b32 s, $1, 0x80008000; shr.u32 t, $1, 4; lop3.b32 t, t, 0x07f007f0, s, 0xea;"
        ),
    ),
    "mxfp4": (
        *(
            _SHORT_FLOAT.format("0x7e807e80", f"shl.b32 t, $1, {shift}; and.b32 t, t, 0x81c081c0;")
            for shift in (0, 3, 6)
        ),
        _SHORT_FLOAT.format(
            "0x7e807e80",
            "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000; shr.u32 s, $1, 5; lop3.b32 t, s, 0x01000100, t, 0xea; "
            "shr.u32 s, $1, 4; lop3.b32 t, s, 0x00c000c0, t, 0xea;",
        ),
    ),
}
"""PTX that makes of two words ($1) the bfloat16 numbers of a part ($0), where codes lie as `packed.py` says."""

_HALF_INT4 = (
    "{{ .reg .b32 t; shr.b32 t, $1, {0}; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $0, t, $2; }}"
)
_HALF_INT8 = (
    "{{ .reg .b32 t, less; mov.b32 less, 0xe480e480; shr.b32 t, $1, {0}; "
    "lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a; add.rn.f16x2 $0, t, less; }}"
)
_HALF_SHORT_FLOAT = "{{ .reg .b32 s, t, by; mov.b32 by, {0}; {1} mul.rn.f16x2 $0, t, by; }}"
_HALF_PAIRS = {
    # 1024 + code has the code as the last bits of its mantissa.
    "int4": tuple(_HALF_INT4.format(4 * part) for part in range(4)),
    # The same of 128 + code, which is the byte with its first bit turned, less 1152.
    "int8": tuple(_HALF_INT8.format(8 * part) for part in range(2)),
    # Exponents differ by a constant from those of float16, subnormal numbers included: times 2^8, 2^14.
    "fp8": (
        _HALF_SHORT_FLOAT.format(
            "0x5c005c00",
            "shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 7; lop3.b32 t, t, 0x3f803f80, s, 0xea;",
        ),
        _HALF_SHORT_FLOAT.format(
            "0x5c005c00", "and.b32 s, $1, 0x80008000; shr.u32 t, $1, 1; lop3.b32 t, t, 0x3f803f80, s, 0xea;"
        ),
    ),
    "mxfp4": (
        *(
            _HALF_SHORT_FLOAT.format(
                "0x74007400",
                f"shl.b32 s, $1, {shift}; and.b32 s, s, 0x80008000; shl.b32 t, $1, {shift + 3}; "
                "lop3.b32 t, t, 0x0e000e00, s, 0xea;",
            )
            for shift in (0, 3, 6)
        ),
        _HALF_SHORT_FLOAT.format(
            "0x74007400",
            "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000; shr.u32 s, $1, 2; lop3.b32 t, s, 0x08000800, t, 0xea; "
            "shr.u32 s, $1, 1; lop3.b32 t, s, 0x06000600, t, 0xea;",
        ),
    ),
}
"""The same for float16."""

# Up to so many tokens sums of a group are multiplied by its scale, beyond that numbers are: rounded to the dtype of x,
# as the library's product of the expanded matrix has them.
_FEW = 32


def multiply_packed(
    x: Tensor, matrix: Packed, bias: Tensor | None, kernel: Kernel, arrivals: Tensor | None = None
) -> Tensor:
    """x W^T + b by one kernel: x: [m, k], bias: [n] or None -> [m, n] in x's dtype; None: expanded, by the library.

    arrivals: int32 zeros for `Tiles` that are split, which they leave zero; None or too few: they are made.
    """
    if isinstance(kernel, Tiles):
        x = x.contiguous()
        done = in_room(lambda sizes: _tiles(x, matrix, bias, sizes, arrivals), kernel)
        if done is not None:
            return done
    whole = expanded(matrix, x.dtype)
    if x.is_meta:  # only listed (runtime/steps/warmup.py); torch's own way there imports its compiler, for a second
        return x.new_empty((x.shape[0], matrix.shape[0]))
    return torch.nn.functional.linear(x, whole, bias)


def expanded(matrix: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k], rounded to a dtype."""
    n, k = matrix.shape
    out = torch.empty((n, k), dtype=dtype, device=matrix.words.device)
    rows = 16
    _expand_kernel[(-(-n // rows), matrix.words.shape[0])](
        matrix.words, matrix.scales, _zeros(matrix), out, n, k=k, ROWS=rows, **_constants(matrix, out), num_warps=4
    )
    return out


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
        FEW=tokens <= _FEW,
        HALF=x.dtype == torch.float16,
        RAISED_ASM=_PAIRS["raised int4"],
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
        "PTX": x.dtype in (torch.bfloat16, torch.float16) and _has_ptx(x),
        "ASM": (_HALF_PAIRS if x.dtype == torch.float16 else _PAIRS)[matrix.format.name],
    }


def _has_ptx(x: Tensor) -> bool:
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
def _pairs(words, less, part: tl.constexpr, ASM: tl.constexpr, HAS_LESS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """bfloat16 or float16: the same by `_PAIRS`, two at a time. less: what is added to 128 + the code of int4, or to
    1024 + that.
    """
    if HAS_LESS and HALF:
        found = tl.inline_asm_elementwise(ASM[part], "=r,r,r", [words, less], dtype=tl.float16, is_pure=True, pack=2)
    elif HAS_LESS:
        found = tl.inline_asm_elementwise(ASM[part], "=r,r,r", [words, less], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif HALF:
        found = tl.inline_asm_elementwise(ASM[part], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        found = tl.inline_asm_elementwise(ASM[part], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
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
    FEW: tl.constexpr,
    HALF: tl.constexpr,
    RAISED_ASM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x W^T + bias in tiles [BN rows, MP tokens], a block of columns a turn."""
    COLUMNS: tl.constexpr = PARTS * SPAN
    ALL: tl.constexpr = (k + COLUMNS - 1) // COLUMNS
    TURNS: tl.constexpr = (ALL + SPLITS - 1) // SPLITS
    MIDDLE: tl.constexpr = 8.0 if FORMAT == "int4" else 0.0
    EXACT: tl.constexpr = k == ALL * COLUMNS and TURNS * SPLITS == ALL
    # Sums of 1024 + code would lose more than those of 128 + code.
    RAISED: tl.constexpr = PTX and FEW and FORMAT == "int4" and not HALF
    BASE: tl.constexpr = 1024.0 if HALF else 128.0
    # What codes have too much, or zero points differ from, is made up for by sums of x.
    BEYOND: tl.constexpr = FEW and (HAS_ZEROS or RAISED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = (tile // ACROSS) * BN + tl.arange(0, BN)
    tokens = (tile % ACROSS) * MP + tl.arange(0, MP)
    inner = tl.arange(0, SPAN)
    first = split * TURNS
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, MP], tl.float32)
    # Scales and zero points are asked for a turn ahead: they are too few to go through the pipeline of the words.
    next_scales, next_zeros = _shared(
        scales, zeros, first, rows, n, GROUPS if FEW else 0, SHARING, HAS_ZEROS and FEW, ALL * GROUPS
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
            scales, zeros, block + 1, rows, n, GROUPS if FEW else 0, SHARING, HAS_ZEROS and FEW, ALL * GROUPS
        )
        part_sum = tl.zeros([BN, MP], tl.float32)
        for part in tl.static_range(PARTS):
            columns = block * COLUMNS + part * SPAN + inner
            wanted = (tokens < m)[None, :]
            if not EXACT:
                wanted = wanted & (columns < k)[:, None]
            xs = tl.load(x + tokens[None, :] * k + columns[:, None], mask=wanted, other=0.0)
            if RAISED:
                number = _pairs(here, here, part, RAISED_ASM, False, HALF)
            elif HAS_ZEROS and not FEW:
                where = rows // SHARING
                if GROUPS > 0:
                    where += (block * GROUPS + part * GROUPS // PARTS) * ((n + SHARING - 1) // SHARING)
                zero = tl.load(zeros + where, mask=inside, other=0).to(tl.float32)[:, None]
                if PTX and FORMAT == "int4":
                    less = tl.broadcast_to((-BASE - zero).to(xs.dtype), here.shape)
                    number = _pairs(here, less, part, ASM, True, HALF)
                else:
                    number = _numbers(here, zero, part, FORMAT)
            elif PTX:
                less = tl.full(here.shape, -BASE - 8.0, xs.dtype)
                number = _pairs(here, less, part, ASM, FORMAT == "int4", HALF)
            else:
                number = _numbers(here, MIDDLE, part, FORMAT)
            if GROUPS > 0 and not FEW:
                where = (block * GROUPS + part * GROUPS // PARTS) * ((n + SHARING - 1) // SHARING) + rows // SHARING
                number = number.to(tl.float32) * _scale(tl.load(scales + where, mask=inside, other=0), FORMAT)[:, None]
            if UPCAST:
                xs = xs.to(tl.float32)
            else:
                number = number.to(xs.dtype)
            if GROUPS == 0 or not FEW:
                acc = tl.dot(number, xs, acc, input_precision="ieee")
            elif (part * GROUPS) % PARTS == 0:
                part_sum = tl.dot(number, xs, input_precision="ieee")
            else:
                part_sum = tl.dot(number, xs, part_sum, input_precision="ieee")
            if BEYOND:
                # A product with ones puts sums of x where the others lie.
                sums = tl.dot(tl.full(here.shape, 1.0, xs.dtype), xs, input_precision="ieee")
                if HAS_ZEROS:
                    zero = these_zeros[part * GROUPS // PARTS].to(tl.float32)
                    sums *= ((-128.0 if RAISED else MIDDLE) - zero)[:, None]
                else:
                    sums *= -136.0
                if GROUPS == 0:
                    acc += sums
                else:
                    part_sum += sums
            if GROUPS > 0 and FEW and ((part + 1) * GROUPS) % PARTS == 0:
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
    ASM: tl.constexpr,
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
