"""Eight float32 lanes as a type of Numba, and what kernels of the CPU do with them.

Numba compiles loops over numbers, and whether LLVM makes vectors of them is luck. Here a kernel says what it wants:
`lanes` is LLVM's <8 x float>, one register of AVX2 and two of NEON, and sums have an order that is written down. Memory
is named by typed pointers: `floats`, `halves` (float16), `brains` (bfloat16) and `exponents` (2^(e - 127), only read)
make one of an address; elements of all are computed with in float32. `codes` are bytes, which `e4m3`, `low` and `high`
read as eight numbers of 8 or 4 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

WIDTH = 8

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)


class Lanes(types.Type):  # type: ignore[misc]
    """The type of eight numbers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def written(function: Callable[..., Any]) -> Any:
    """What kernels may call; the function writes its LLVM."""
    return intrinsic(function)


# -- arithmetic ----------------------------------------------------------------------------------


def _operation(symbol: Any, method: str) -> None:
    """`symbol` of two lanes is the builder's `method`."""

    class Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and all(isinstance(a, Lanes) for a in args):
                return signature(lanes, lanes, lanes)
            return None

    infer_global(symbol)(Template)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, method)(*args)

    lower_builtin(symbol, Lanes, Lanes)(lower)


for _symbol, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operation(_symbol, _method)


def _call(builder: Any, name: str, kind: Any, args: Sequence[Any]) -> Any:
    """LLVM's own function `name` of that type."""
    suffix = "v8f32" if isinstance(kind, ir.VectorType) else "f32"
    shape = ir.FunctionType(kind, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, shape, f"{name}.{suffix}")
    return builder.call(function, args)


@written
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one rounding where the processor has that."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.fmuladd", args[0].type, args)

    kind = lanes if isinstance(a, Lanes) else types.float32
    return signature(kind, kind, kind, kind), lower


@written
def splat(typing: Any, x: Any) -> Any:
    """All lanes x."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return signature(lanes, types.float32), lower


def _splat(builder: Any, x: Any) -> Any:
    kind = ir.VectorType(x.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * WIDTH))


def by_halves(builder: Any, v: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lanes combined by halves: (0 4)(1 5).., then (0 2).., then (0 1) -> one number."""
    count = v.type.count
    while count > 1:
        count //= 2
        parts = [
            builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_INT, count), list(range(k, k + count))))
            for k in (0, count)
        ]
        v = combine(*parts)
    return builder.extract_element(v, ir.Constant(_INT, 0))


@written
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes, by halves."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return by_halves(builder, args[0], builder.fadd)

    return signature(types.float32, lanes), lower


@written
def largest(typing: Any, a: Any) -> Any:
    """The largest lane; any number where one of them is none."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return by_halves(builder, args[0], lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return signature(types.float32, lanes), lower


@written
def greater(typing: Any, a: Any, b: Any) -> Any:
    """The greater of each pair; b where either is not a number."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b = args
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return signature(lanes, lanes, lanes), lower


@written
def first_of(typing: Any, a: Any) -> Any:
    """The first lane."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(_INT, 0))

    return signature(types.float32, lanes), lower


@written
def front(typing: Any, a: Any, count: Any) -> Any:
    """The first `count` lanes, 0 in the others."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = _splat(builder, builder.trunc(args[1], _INT))
        inside = builder.icmp_signed("<", ir.Constant(_INTS, list(range(WIDTH))), count)
        return builder.select(inside, args[0], ir.Constant(_FLOATS, [0.0] * WIDTH))

    return signature(lanes, lanes, types.int64), lower


@written
def root(typing: Any, a: Any) -> Any:
    """The square root of a number."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.sqrt", args[0].type, args)

    return signature(types.float32, types.float32), lower


@written
def totals(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Lane k is the sum of the k-th argument's lanes; the order of each sum is the same."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def pick(x: Any, y: Any, order: Sequence[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(_INTS, order))

        # Neighbours within halves of the register, as its instructions have it; the halves meet last.
        low, high = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        v = list(args)
        for _ in range(2):
            v = [builder.fadd(pick(x, y, low), pick(x, y, high)) for x, y in zip(v[::2], v[1::2], strict=True)]
        x, y = v
        return builder.fadd(pick(x, y, [0, 1, 2, 3, 12, 13, 14, 15]), pick(x, y, [4, 5, 6, 7, 8, 9, 10, 11]))

    return signature(lanes, *(lanes,) * WIDTH), lower


@written
def flipped(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Eight of them: the k-th has the k-th lane of each argument."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def both(x: Any, y: Any, *orders: Sequence[int]) -> list[Any]:
            return [builder.shuffle_vector(x, y, ir.Constant(_INTS, order)) for order in orders]

        # Neighbours, and pairs of them, within halves of the register, as its instructions have it; then the halves.
        ones = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        twos = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        v = [x for k in (0, 2, 4, 6) for x in both(args[k], args[k + 1], *ones)]
        v = [x for k in (0, 1, 4, 5) for x in both(v[k], v[k + 2], *twos)]
        halves = [both(v[k], v[k + 4], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]) for k in range(4)]
        v = [x for half in zip(*halves, strict=True) for x in half]
        return context.make_tuple(builder, sig.return_type, v)

    return signature(types.UniTuple(lanes, WIDTH), *(lanes,) * WIDTH), lower


# 2^x on [-1/2, 1/2], the terms of its Taylor series: the first that is left out is at most 1.4e-9 of it.
_POWER = [1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477]
_POWER += [0.0013333558146428443, 0.00015403530393381608, 1.525273380405984e-05]
_ROUND = 1.5 * 2.0**23


@written
def power(typing: Any, a: Any) -> Any:
    """2^a to 2e-7 of it; 0 below -126, and 2^127 above 127."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (x,) = args

        def number(value: float) -> Any:
            return ir.Constant(_FLOATS, [value] * WIDTH)

        least, most = number(-126.0), number(127.0)
        is_least = builder.fcmp_ordered("<", x, least)
        x = builder.select(is_least, least, x)
        x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
        # Adding this much leaves no room for what is behind the point: the whole part stands in the last bits.
        shifted = builder.fadd(x, number(_ROUND))
        rest = builder.fsub(x, builder.fsub(shifted, number(_ROUND)))
        result = number(_POWER[-1])
        for factor in reversed(_POWER[:-1]):
            result = _call(builder, "llvm.fmuladd", _FLOATS, [result, rest, number(factor)])
        bits = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * WIDTH))
        scale = builder.bitcast(builder.add(bits, ir.Constant(_INTS, [127 << 23] * WIDTH)), _FLOATS)
        return builder.select(is_least, number(0.0), builder.fmul(result, scale))

    return signature(lanes, lanes), lower


# -- memory --------------------------------------------------------------------------------------

FLOATS = types.CPointer(types.float32)
HALVES = types.CPointer(types.int16)
BRAINS = types.CPointer(types.uint16)
INTS = types.CPointer(types.int32)
LONGS = types.CPointer(types.int64)
DOUBLES = types.CPointer(types.float64)
EXPONENTS = types.CPointer(types.boolean)
CODES = types.CPointer(types.uint8)

_ELEMENT = {
    FLOATS: _FLOAT,
    HALVES: ir.IntType(16),
    BRAINS: ir.IntType(16),
    INTS: _INT,
    LONGS: _LONG,
    DOUBLES: ir.DoubleType(),
    EXPONENTS: ir.IntType(8),
    CODES: ir.IntType(8),
}


_ALIGNED = {FLOATS: 4, EXPONENTS: 1}


def pointer_to(kind: Any) -> Any:
    """What makes such a pointer of an address."""

    def at(typing: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return signature(kind, types.int64), lower

    return intrinsic(at)


floats, halves, brains, ints = (pointer_to(kind) for kind in (FLOATS, HALVES, BRAINS, INTS))
longs, doubles, exponents, codes = (pointer_to(kind) for kind in (LONGS, DOUBLES, EXPONENTS, CODES))


@written
def like(typing: Any, pointer: Any, address: Any) -> Any:
    """A pointer of the same kind to an address."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], args[0].type)

    return signature(pointer, pointer, types.int64), lower


def _place(builder: Any, kind: Any, pointer: Any, index: Any, count: int | None = None) -> Any:
    """A pointer to `count` elements (None: to one), from the index-th of `kind` on."""
    element = _ELEMENT[kind]
    here = builder.bitcast(pointer, element.as_pointer())
    here = builder.gep(here, [index])
    return here if count is None else builder.bitcast(here, ir.VectorType(element, count).as_pointer())


class _Bits:
    """Integers as wide as a float32 or as many lanes are, for what processors without 16-bit floats have to be told."""

    def __init__(self, builder: Any, wide: Any) -> None:
        self._count = wide.count if isinstance(wide, ir.VectorType) else None
        self.builder = builder
        self.floats = wide
        self.integers = _INT if self._count is None else ir.VectorType(_INT, self._count)
        self.stored = ir.IntType(16) if self._count is None else ir.VectorType(ir.IntType(16), self._count)

    def number(self, value: int) -> Any:
        """The same in all lanes."""
        return ir.Constant(self.integers, value if self._count is None else [value] * self._count)

    def float_of(self, bits: Any) -> Any:
        """What these bits mean."""
        return self.builder.bitcast(bits, self.floats)

    def bits_of(self, x: Any) -> Any:
        """The bits of a float32."""
        return self.builder.bitcast(x, self.integers)


def _widened(builder: Any, kind: Any, raw: Any, wide: Any) -> Any:
    """Elements as they are stored, as float32 (integers as they are)."""
    if kind not in (HALVES, BRAINS, EXPONENTS):
        return raw
    to = _Bits(builder, wide)
    bits = builder.zext(raw, to.integers)
    if kind == EXPONENTS:
        # 2^-127, the least, is no normal number.
        least = builder.icmp_unsigned("==", bits, to.number(0))
        return to.float_of(builder.select(least, to.number(1 << 22), builder.shl(bits, to.number(23))))
    if kind == BRAINS:
        return to.float_of(builder.shl(bits, to.number(16)))
    # The exponent's bias is 15, not 127: times 2^112, which makes normal numbers of small ones, too.
    size = builder.shl(builder.and_(bits, to.number(0x7FFF)), to.number(13))
    value = to.bits_of(builder.fmul(to.float_of(size), to.float_of(to.number((127 + 112) << 23))))
    is_last = builder.icmp_unsigned(">=", size, to.number(0x7C00 << 13))
    value = builder.select(is_last, builder.or_(size, to.number(0x7F800000)), value)
    sign = builder.shl(builder.and_(bits, to.number(0x8000)), to.number(16))
    return to.float_of(builder.or_(value, sign))


def narrowed(builder: Any, kind: Any, x: Any) -> Any:
    """float32 as elements of `kind`, to the nearest, of two that are as near the even one."""
    if kind not in (HALVES, BRAINS):
        return x
    to = _Bits(builder, x.type)
    bits, is_none = to.bits_of(x), builder.fcmp_unordered("uno", x, x)
    dropped = to.number(16 if kind == BRAINS else 13)
    odd = builder.and_(builder.lshr(bits, dropped), to.number(1))
    if kind == BRAINS:
        near = builder.lshr(builder.add(builder.add(bits, to.number(0x7FFF)), odd), dropped)
        # Rounding up the bits of what is no number could make one.
        return builder.trunc(builder.select(is_none, to.number(0x7FC0), near), to.stored)
    sign = builder.lshr(builder.and_(bits, to.number(0x80000000)), to.number(16))
    size = builder.and_(bits, to.number(0x7FFFFFFF))
    normal = builder.lshr(builder.add(builder.add(size, to.number(0xFFF - (112 << 23))), odd), dropped)
    # Adding 1/2 shifts a small number's bits to where they stand in a half, and rounds.
    shift = to.number((127 - 15 + 23 - 10 + 1) << 23)
    small = builder.sub(to.bits_of(builder.fadd(to.float_of(size), to.float_of(shift))), shift)
    half = builder.select(builder.icmp_unsigned("<", size, to.number(113 << 23)), small, normal)
    half = builder.select(builder.icmp_unsigned(">=", size, to.number((127 + 16) << 23)), to.number(0x7C00), half)
    half = builder.select(is_none, to.number(0x7E00), half)
    return builder.trunc(builder.or_(half, sign), to.stored)


@written
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """Eight elements from the index-th on, as lanes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        raw = builder.load(_place(builder, kind, args[0], args[1], WIDTH), align=_ALIGNED.get(kind, 2))
        return _widened(builder, kind, raw, _FLOATS)

    return signature(lanes, pointer, types.int64), lower


def _codes(builder: Any, args: Any) -> Any:
    """Eight bytes, as integers."""
    raw = builder.load(_place(builder, CODES, args[0], args[1], WIDTH), align=1)
    return builder.zext(raw, _INTS)


@written
def e4m3(typing: Any, pointer: Any, index: Any) -> Any:
    """Eight bytes from the index-th on as numbers of FP8; that some of its codes are none is not looked at."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        raw, to = _codes(builder, args), _Bits(builder, _FLOATS)
        # The bits where float32 has its own, whose exponents are larger by 120.
        size = builder.shl(builder.and_(raw, to.number(127)), to.number(20))
        sign = builder.shl(builder.and_(raw, to.number(128)), to.number(24))
        return builder.fmul(to.float_of(builder.or_(size, sign)), to.float_of(to.number(247 << 23)))

    return signature(lanes, pointer, types.int64), lower


@written
def low(typing: Any, pointer: Any, index: Any) -> Any:
    """The lower four bits of eight bytes from the index-th on."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(builder.and_(_codes(builder, args), ir.Constant(_INTS, [15] * WIDTH)), _FLOATS)

    return signature(lanes, pointer, types.int64), lower


@written
def high(typing: Any, pointer: Any, index: Any) -> Any:
    """The upper four bits of eight bytes from the index-th on."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(builder.lshr(_codes(builder, args), ir.Constant(_INTS, [4] * WIDTH)), _FLOATS)

    return signature(lanes, pointer, types.int64), lower


@written
def store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Lanes into eight elements."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        raw = narrowed(builder, kind, args[2])
        builder.store(raw, _place(builder, kind, args[0], args[1], WIDTH), align=2 if kind != FLOATS else 4)
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, lanes), lower


@written
def get(typing: Any, pointer: Any, index: Any) -> Any:
    """One element: an int64, or a float32."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        raw = builder.load(_place(builder, kind, *args))
        if kind == DOUBLES:
            return builder.fptrunc(raw, _FLOAT)
        return builder.sext(raw, _LONG) if kind == INTS else _widened(builder, kind, raw, _FLOAT)

    return signature(types.int64 if pointer in (INTS, LONGS) else types.float32, pointer, types.int64), lower


@written
def put(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """One number into an element: an int64 among such, else a float32."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        builder.store(narrowed(builder, kind, args[2]), _place(builder, kind, *args[:2]))
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, types.int64 if pointer == LONGS else types.float32), lower


@written
def rounded(typing: Any, pointer: Any, value: Any) -> Any:
    """A number or lanes as they would come back after being stored there."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        return _widened(builder, kind, narrowed(builder, kind, args[1]), args[1].type)

    return signature(value, pointer, value), lower


@written
def stack(typing: Any, count: Any) -> Any:
    """Memory for so many float32 until the kernel returns, at a multiple of 64 bytes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        memory = builder.alloca(_FLOAT, size=args[0])
        memory.align = 64
        return builder.bitcast(memory, context.get_value_type(FLOATS))

    return signature(FLOATS, types.int64), lower


@written
def next_of(typing: Any, counter: Any) -> Any:
    """What stands there; one more stands there then, whoever else counts at the same time."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.bitcast(args[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "monotonic")

    return signature(types.int64, LONGS), lower


@written
def begin_region(typing: Any, region: Any, kernel: Any, arguments: Any, threads: Any) -> Any:
    """`region(kernel, (0, arguments), threads, 0)`, which is GOMP_parallel; its two words live until it returns."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        region, kernel, arguments, threads = args
        words = cgutils.alloca_once(builder, ir.ArrayType(_LONG, 2))
        words = builder.bitcast(words, _LONG.as_pointer())
        builder.store(ir.Constant(_LONG, 0), words)
        builder.store(arguments, builder.gep(words, [ir.Constant(_LONG, 1)]))
        body = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()]).as_pointer()
        whole = ir.FunctionType(ir.VoidType(), [body, _LONG.as_pointer(), _INT, _INT]).as_pointer()
        several = builder.icmp_signed("!=", region, ir.Constant(_LONG, 0))
        with builder.if_else(several) as (then, otherwise):
            with then:
                count = builder.trunc(threads, _INT)
                builder.call(
                    builder.inttoptr(region, whole),
                    [builder.inttoptr(kernel, body), words, count, ir.Constant(_INT, 0)],
                )
            with otherwise:
                builder.call(builder.inttoptr(kernel, body), [words])
        return context.get_dummy_value()

    return signature(types.none, types.int64, types.int64, types.int64, types.int64), lower
