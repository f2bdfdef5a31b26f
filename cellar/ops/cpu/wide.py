"""Sixteen float32 lanes, and the codes of quantized numbers that are decoded into them.

One register of AVX-512, two of AVX2; what is computed is the same, bit for bit. Memory is named as in `lanes.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.core.typing import signature
from numba.extending import intrinsic, models, register_model

from cellar.ops.cpu.blocks import BLOCK, SIZE
from cellar.ops.cpu.lanes import BRAINS, FLOATS, by_halves, narrowed, pointer_to, written

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, SIZE), ir.VectorType(_FLOAT, SIZE)

# (e, m) of MXFP4's codes 0 to 7: twice their numbers, four bits each.
_E2M1_TWICE = 0xC8643210


class Wide(types.Type):  # type: ignore[misc]
    """The type of sixteen numbers."""

    def __init__(self) -> None:
        super().__init__(name="Wide")


wide = Wide()


@register_model(Wide)
class _WideModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


# Codes (`quant/matrix.py`); what these point to only tells the kinds apart.
INT8S, INT4S = types.CPointer(types.int8), types.CPointer(types.uint8)
FP8S, MXFP4S = types.CPointer(types.uint32), types.CPointer(types.uint64)
int8s, int4s, fp8s, mxfp4s = (pointer_to(kind) for kind in (INT8S, INT4S, FP8S, MXFP4S))


@functools.cache
def has(feature: str) -> bool:
    """True if what is compiled here may use a feature of processors, as LLVM calls it."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES
    if config.CPU_NAME is not None:
        return False
    return bool(binding.get_host_cpu_features().get(feature, False))


def _has_avx512() -> bool:
    """Its registers are asked for, and a table of sixteen is one."""
    return has("avx512f")


def use_whole_registers(builder: Any) -> None:
    """Where there are any: LLVM prefers half registers on processors that once slowed down for whole ones."""
    if _has_avx512():
        # llvmlite knows the plain attributes only.
        set.add(builder.function.attributes, '"min-legal-vector-width"="512"')


@written
def is_one_register(typing: Any) -> Any:
    """Whether sixteen lanes are one register, of which there are thirty-two, and not two of sixteen."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(_has_avx512()))

    return signature(types.boolean), lower


def _all(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * SIZE)


def _spread(builder: Any, x: Any) -> Any:
    kind = ir.VectorType(x.type, SIZE)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _all(_INTS, 0))


@written
def wide_splat(typing: Any, x: Any) -> Any:
    """All lanes x."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _spread(builder, args[0])

    return signature(wide, types.float32), lower


@written
def wide_fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one rounding where the processor has that."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        shape = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        function = builder.module.globals.get("llvm.fmuladd.v16f32")
        if function is None:
            function = ir.Function(builder.module, shape, "llvm.fmuladd.v16f32")
        return builder.call(function, args)

    return signature(wide, wide, wide, wide), lower


def _of_two(method: str) -> Any:
    """The builder's `method` of two, lane by lane."""

    def both(typing: Any, a: Any, b: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            use_whole_registers(builder)
            return getattr(builder, method)(*args)

        return signature(wide, wide, wide), lower

    return intrinsic(both)


wide_times, wide_plus = _of_two("fmul"), _of_two("fadd")


@written
def wide_total(typing: Any, a: Any) -> Any:
    """The sum of the lanes, by halves."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return by_halves(builder, args[0], builder.fadd)

    return signature(types.float32, wide), lower


def _place(builder: Any, pointer: Any, index: Any, element: Any) -> Any:
    first = builder.gep(builder.bitcast(pointer, element.as_pointer()), [index])
    return builder.bitcast(first, ir.VectorType(element, SIZE).as_pointer())


@written
def wide_load(typing: Any, pointer: Any, index: Any) -> Any:
    """Sixteen float32 from the index-th on."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_place(builder, args[0], args[1], _FLOAT), align=4)

    return signature(wide, FLOATS, types.int64), lower


@written
def wide_store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Lanes into sixteen elements, float32 or bfloat16."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == FLOATS:
            builder.store(args[2], _place(builder, args[0], args[1], _FLOAT), align=4)
        else:
            there = _place(builder, args[0], args[1], ir.IntType(16))
            builder.store(narrowed(builder, BRAINS, args[2]), there, align=2)
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, wide), lower


@written
def wide_turn(typing: Any, pointer: Any, index: Any) -> Any:
    """Sixteen rows of sixteen float32, from the index-th on, become columns."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        starts = [builder.add(args[1], ir.Constant(_LONG, SIZE * r)) for r in range(SIZE)]
        places = [_place(builder, args[0], start, _FLOAT) for start in starts]
        rows = [builder.load(place, align=4) for place in places]
        for width in (1, 2, 4, 8):
            # Of two rows so far apart each has lanes of the other where the two bits differ.
            for r in (r for r in range(SIZE) if not r & width):
                both = rows[r], rows[r + width]
                first = [SIZE + lane - width if lane & width else lane for lane in range(SIZE)]
                second = [SIZE + lane if lane & width else lane + width for lane in range(SIZE)]
                rows[r] = builder.shuffle_vector(*both, ir.Constant(_INTS, first))
                rows[r + width] = builder.shuffle_vector(*both, ir.Constant(_INTS, second))
        for row, place in zip(rows, places, strict=True):
            builder.store(row, place, align=4)
        return context.get_dummy_value()

    return signature(types.none, FLOATS, types.int64), lower


@written
def byte_of(typing: Any, codes: Any, index: Any) -> Any:
    """A zero point of such codes: an int64."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        raw = builder.load(builder.gep(builder.bitcast(args[0], _BYTE.as_pointer()), [args[1]]))
        return (builder.sext if sig.args[0] == INT8S else builder.zext)(raw, _LONG)

    return signature(types.int64, codes, types.int64), lower


@written
def decoded(typing: Any, codes: Any, index: Any, zero: Any) -> Any:
    """The index-th block of codes as numbers, less `zero` if they are integers: two lanes. Exact."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        kind = sig.args[0]
        paired = kind in (INT4S, MXFP4S)
        first = builder.mul(args[1], ir.Constant(_LONG, SIZE if paired else BLOCK))

        def read(offset: int) -> Any:
            at = builder.add(first, ir.Constant(_LONG, offset))
            raw = builder.load(_place(builder, args[0], at, _BYTE), align=1)
            return (builder.sext if kind == INT8S else builder.zext)(raw, _INTS)

        zero = builder.trunc(args[2], _INT)
        if not paired:
            parts = [_byte(builder, kind, read(offset), zero) for offset in (0, SIZE)]
        elif _has_avx512():
            table, both = _table(builder, kind, zero), read(0)
            parts = [_looked_up(builder, table, bits) for bits in (both, builder.lshr(both, _all(_INTS, 4)))]
        else:
            both = read(0)
            halves = (builder.and_(both, _all(_INTS, 15)), builder.lshr(both, _all(_INTS, 4)))
            parts = [_nibble(builder, kind, bits, zero) for bits in halves]
        return context.make_tuple(builder, sig.return_type, parts)

    return signature(types.UniTuple(wide, 2), codes, types.int64, types.int64), lower


def ask_for(builder: Any, pointer: Any, byte: Any) -> None:
    """Have the line of a byte come into the cache."""
    there = builder.gep(builder.bitcast(pointer, _BYTE.as_pointer()), [byte])
    function = builder.module.globals.get("llvm.prefetch.p0i8")
    if function is None:
        shape = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = ir.Function(builder.module, shape, "llvm.prefetch.p0i8")
    builder.call(function, [there, *(ir.Constant(_INT, number) for number in (0, 3, 1))])


@written
def fetch(typing: Any, codes: Any, index: Any) -> Any:
    """Have the index-th block come into the cache; it need not exist."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        size = SIZE if sig.args[0] in (INT4S, MXFP4S) else BLOCK
        ask_for(builder, args[0], builder.mul(args[1], ir.Constant(_LONG, size)))
        return context.get_dummy_value()

    return signature(types.none, codes, types.int64), lower


def _table(builder: Any, kind: Any, zero: Any) -> Any:
    """The numbers of all sixteen codes."""
    return _nibble(builder, kind, ir.Constant(_INTS, list(range(SIZE))), zero)


def _looked_up(builder: Any, table: Any, bits: Any) -> Any:
    """By the lowest four bits of each lane: the instruction reads no others."""
    name = "llvm.x86.avx512.permvar.sf.512"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _INTS]), name)
    return builder.call(function, [table, bits])


def _nibble(builder: Any, kind: Any, bits: Any, zero: Any) -> Any:
    if kind == INT4S:
        return builder.sitofp(builder.sub(bits, _spread(builder, zero)), _FLOATS)
    # Small numbers would not be normal ones if their bits were put where float32 has its own, and those are slow.
    place = builder.shl(builder.and_(bits, _all(_INTS, 7)), _all(_INTS, 2))
    twice = builder.and_(builder.lshr(_all(_INTS, _E2M1_TWICE), place), _all(_INTS, 15))
    size = builder.fmul(builder.uitofp(twice, _FLOATS), _all(_FLOATS, 0.5))
    sign = builder.shl(builder.and_(bits, _all(_INTS, 8)), _all(_INTS, 28))
    return builder.bitcast(builder.or_(builder.bitcast(size, _INTS), sign), _FLOATS)


def _byte(builder: Any, kind: Any, bits: Any, zero: Any) -> Any:
    if kind == INT8S:
        return builder.sitofp(builder.sub(bits, _spread(builder, zero)), _FLOATS)
    # The bits of e4m3 where float32 has its own, whose exponents are larger by 120.
    sign = builder.shl(builder.and_(bits, _all(_INTS, 128)), _all(_INTS, 24))
    size = builder.shl(builder.and_(bits, _all(_INTS, 127)), _all(_INTS, 20))
    return builder.fmul(builder.bitcast(builder.or_(sign, size), _FLOATS), _all(_FLOATS, 2.0**120))
