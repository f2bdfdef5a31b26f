"""Sixty-four bytes, and their dot products in whole numbers, where a processor has an instruction for them (VNNI).

`Whole` is one register of AVX-512: sixteen int32, or sixty-four bytes. Memory is named as in `lanes.py`; where nothing
else is said, what is read or written begins at the `index`-th byte of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic, models, register_model

from cellar.ops.cpu.blocks import SIZE
from cellar.ops.cpu.lanes import BRAINS, FLOATS, by_halves, written
from cellar.ops.cpu.wide import ask_for, has, use_whole_registers, wide

_BYTE, _SHORT, _INT, _LONG, _FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
_INTS, _FLOATS = ir.VectorType(_INT, SIZE), ir.VectorType(_FLOAT, SIZE)

# Rounding as the processor is set, which is to the nearest.
_AS_SET = 4


def has_dots() -> bool:
    """True if what is compiled here may use the instruction."""
    return has("avx512vnni") and has("avx512bw")


class Whole(types.Type):  # type: ignore[misc]
    """The type of sixteen int32."""

    def __init__(self) -> None:
        super().__init__(name="Whole")


whole = Whole()


@register_model(Whole)
class _WholeModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _INTS)


def _all(value: Any) -> Any:
    return ir.Constant(_INTS, [value] * SIZE)


def _spread(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), builder.trunc(x, _INT), ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), _all(0))


def _called(builder: Any, name: str, kind: Any, args: Any) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [a.type for a in args]), name)
    return builder.call(function, args)


def _nearest(builder: Any, x: Any) -> Any:
    rest = [_all(0), ir.Constant(_SHORT, -1), ir.Constant(_INT, _AS_SET)]
    return _called(builder, "llvm.x86.avx512.mask.cvtps2dq.512", _INTS, [x, *rest])


def _bytes_at(builder: Any, kind: Any, pointer: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(builder.bitcast(pointer, _BYTE.as_pointer()), [index]), kind.as_pointer())


@written
def whole_load(typing: Any, pointer: Any, index: Any) -> Any:
    """Sixty-four bytes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.load(_bytes_at(builder, _INTS, *args), align=1)

    return signature(whole, pointer, types.int64), lower


@written
def whole_store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Likewise."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        builder.store(args[2], _bytes_at(builder, _INTS, *args[:2]), align=1)
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, whole), lower


@written
def quarter_store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """The lowest byte of each of the sixteen."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        kind = ir.VectorType(_BYTE, SIZE)
        builder.store(builder.trunc(args[2], kind), _bytes_at(builder, kind, *args[:2]), align=1)
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, whole), lower


@written
def whole_splat(typing: Any, x: Any) -> Any:
    """All sixteen x."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return _spread(builder, args[0])

    return signature(whole, types.int64), lower


def _of_two(method: str) -> Any:
    """The builder's `method` of two, one by one."""

    def both(typing: Any, a: Any, b: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            use_whole_registers(builder)
            return getattr(builder, method)(*args)

        return signature(whole, whole, whole), lower

    return intrinsic(both)


def _of_one(function: Callable[[Any, Any], Any]) -> Any:
    """What the function writes of one."""

    def one(typing: Any, a: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            use_whole_registers(builder)
            return function(builder, args[0])

        return signature(whole, whole), lower

    return intrinsic(one)


whole_plus, whole_minus, whole_times = _of_two("add"), _of_two("sub"), _of_two("mul")
"""In 32 bits each."""

low_nibbles = _of_one(lambda builder, a: builder.and_(a, _all(0x0F0F0F0F)))
high_nibbles = _of_one(lambda builder, a: builder.and_(builder.lshr(a, _all(4)), _all(0x0F0F0F0F)))
raised = _of_one(lambda builder, a: builder.xor(a, _all(0x80808080)))
"""Bytes with a sign, 128 higher and without one."""

times_256 = _of_one(lambda builder, a: builder.shl(a, _all(8)))
nearest_256th = _of_one(lambda builder, a: builder.ashr(builder.add(a, _all(128)), _all(8)))
"""What is left, less 256 times this, is a byte with a sign."""

next_codes = _of_one(lambda builder, a: builder.lshr(a, _all(4)))
"""The next four bits of each word come to the lowest."""

size_bits = _of_one(lambda builder, a: builder.and_(a, _all(0x7FFFFFFF)))


@written
def dot(typing: Any, sums: Any, a: Any, b: Any) -> Any:
    """To each int32 the products of its four bytes are added: those of a have no sign, those of b have one."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return _called(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, args)

    return signature(whole, whole, whole, whole), lower


@written
def numbers(typing: Any, a: Any) -> Any:
    """As float32."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.sitofp(args[0], _FLOATS)

    return signature(wide, whole), lower


@written
def nearest(typing: Any, a: Any) -> Any:
    """The nearest int32 of each number; -2^31 for what has none."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return _nearest(builder, args[0])

    return signature(whole, wide), lower


@written
def code_of(typing: Any, a: Any) -> Any:
    """The nearest of 0 to 15 to each number; 0 for what is none."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        found = _nearest(builder, args[0])
        found = builder.select(builder.icmp_signed(">", found, _all(0)), found, _all(0))
        return builder.select(builder.icmp_signed("<", found, _all(15)), found, _all(15))

    return signature(whole, wide), lower


@written
def e4m3_numbers(typing: Any, pointer: Any, index: Any) -> Any:
    """Sixteen bytes from the index-th on as numbers of FP8; that some of its codes are none is not looked at."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        kind = ir.VectorType(_BYTE, SIZE)
        raw = builder.zext(builder.load(_bytes_at(builder, kind, *args), align=1), _INTS)
        # The bits where float32 has its own, whose exponents are larger by 120.
        size = builder.shl(builder.and_(raw, _all(127)), _all(20))
        sign = builder.shl(builder.and_(raw, _all(128)), _all(24))
        tiny = builder.bitcast(builder.or_(size, sign), _FLOATS)
        return builder.fmul(tiny, builder.bitcast(_all(247 << 23), _FLOATS))

    return signature(wide, pointer, types.int64), lower


@written
def e4m3_codes(typing: Any, a: Any) -> Any:
    """The nearest codes of FP8 of numbers up to 448, of two the even one."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        all_bits = builder.bitcast(args[0], _INTS)
        size = builder.and_(all_bits, _all(0x7FFFFFFF))
        sign = builder.and_(builder.lshr(all_bits, _all(24)), _all(128))
        even = builder.and_(builder.lshr(size, _all(20)), _all(1))
        up = builder.add(builder.add(size, _all(0x7FFFF)), even)
        normal = builder.sub(builder.lshr(up, _all(20)), _all(120 << 3))
        # Below 2^-6 codes count in steps of 2^-9.
        steps = builder.fmul(builder.bitcast(size, _FLOATS), builder.bitcast(_all(136 << 23), _FLOATS))
        few = _nearest(builder, steps)
        found = builder.select(builder.icmp_unsigned("<", size, _all(121 << 23)), few, normal)
        found = builder.select(builder.icmp_unsigned(">", size, _all(0x7F800000)), _all(127), found)
        return builder.or_(found, sign)

    return signature(whole, wide), lower


@written
def put_byte(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """One byte."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[2], _BYTE), _bytes_at(builder, _BYTE, *args[:2]))
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64, types.int64), lower


@written
def pair_of(typing: Any, a: Any, b: Any) -> Any:
    """Two codes in a byte, the second one above."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.or_(args[0], builder.shl(args[1], _all(4)))

    return signature(whole, whole, whole), lower


@written
def bits(typing: Any, a: Any) -> Any:
    """Of sixteen float32."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.bitcast(args[0], _INTS)

    return signature(whole, wide), lower


@written
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair, without signs."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.select(builder.icmp_unsigned(">", *args), *args)

    return signature(whole, whole, whole), lower


@written
def largest_of(typing: Any, a: Any) -> Any:
    """The largest of the sixteen, without signs: an int64."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        most = by_halves(builder, args[0], lambda x, y: builder.select(builder.icmp_unsigned(">", x, y), x, y))
        return builder.zext(most, _LONG)

    return signature(types.int64, whole), lower


@written
def number_of(typing: Any, a: Any) -> Any:
    """The float32 of these bits."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _INT), _FLOAT)

    return signature(types.float32, types.int64), lower


@written
def of_pairs(typing: Any, pointer: Any, index: Any) -> Any:
    """Thirty-two bfloat16 from the index-th on: the first of each pair, and the second."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        at = builder.mul(args[1], ir.Constant(_LONG, 2))
        both = builder.load(_bytes_at(builder, _INTS, args[0], at), align=2)
        parts = builder.shl(both, _all(16)), builder.and_(both, _all(0xFFFF0000))
        return context.make_tuple(builder, sig.return_type, [builder.bitcast(part, _FLOATS) for part in parts])

    return signature(types.UniTuple(wide, 2), BRAINS, types.int64), lower


def _as_numbers(builder: Any, kind: Any, raw: Any) -> Any:
    """Sixteen elements of such memory, read as integers or float32, as float32."""
    if kind == FLOATS:
        return raw
    if kind == BRAINS:
        return builder.bitcast(builder.shl(builder.zext(raw, _INTS), _all(16)), _FLOATS)
    return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), SIZE)), _FLOATS)


def _stored(kind: Any) -> tuple[Any, int]:
    """What an element of such memory is read as, and its bytes."""
    return (_FLOAT, 4) if kind == FLOATS else (_SHORT, 2)


def _front_of(builder: Any, element: Any, size: int, pointer: Any, index: Any, count: Any) -> Any:
    """Sixteen elements from the index-th on, of which `count` are read, and the others 0."""
    kind = ir.VectorType(element, SIZE)
    here = _bytes_at(builder, kind, pointer, builder.mul(index, ir.Constant(_LONG, size)))
    there = builder.icmp_unsigned("<", ir.Constant(_INTS, list(range(SIZE))), _spread(builder, count))
    args = [here, ir.Constant(_INT, 1), there, ir.Constant(kind, [element(0)] * SIZE)]
    return _called(builder, f"llvm.masked.load.v{SIZE}{element.intrinsic_name}.p0", kind, args)


@written
def sixteen(typing: Any, pointer: Any, index: Any) -> Any:
    """Sixteen elements from the index-th on, as numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        kind = sig.args[0]
        element, size = _stored(kind)
        at = builder.mul(args[1], ir.Constant(_LONG, size))
        raw = builder.load(_bytes_at(builder, ir.VectorType(element, SIZE), args[0], at), align=size)
        return _as_numbers(builder, kind, raw)

    return signature(wide, pointer, types.int64), lower


@written
def front_sixteen(typing: Any, pointer: Any, index: Any, count: Any) -> Any:
    """The first `count` of them, and 0 behind these."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        kind = sig.args[0]
        return _as_numbers(builder, kind, _front_of(builder, *_stored(kind), *args))

    return signature(wide, pointer, types.int64, types.int64), lower


@written
def front_bytes(typing: Any, pointer: Any, index: Any, count: Any) -> Any:
    """Likewise of bytes without signs, as whole numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        return builder.zext(_front_of(builder, _BYTE, 1, *args), _INTS)

    return signature(whole, pointer, types.int64, types.int64), lower


@written
def fetch_byte(typing: Any, pointer: Any, index: Any) -> Any:
    """Have the line of the index-th byte come into the cache; it need not exist."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ask_for(builder, *args)
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64), lower


@written
def fetch_element(typing: Any, pointer: Any, index: Any) -> Any:
    """The same of the index-th element."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, size = _stored(sig.args[0])
        ask_for(builder, args[0], builder.mul(args[1], ir.Constant(_LONG, size)))
        return context.get_dummy_value()

    return signature(types.none, pointer, types.int64), lower


@written
def shares(typing: Any, count: Any) -> Any:
    """Which of `count` equal shares each of sixteen belongs to; a power of two, at most 16."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        lanes = ir.Constant(_INTS, list(range(SIZE)))
        return builder.lshr(builder.mul(lanes, _spread(builder, args[0])), _all(4))

    return signature(whole, types.int64), lower


def _chosen(builder: Any, name: str, kind: Any, args: Any) -> Any:
    use_whole_registers(builder)
    return _called(builder, name, kind, args)


@written
def chosen(typing: Any, table: Any, which: Any) -> Any:
    """The table's members `which`, below 16: of numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _chosen(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, args)

    return signature(wide, wide, whole), lower


@written
def whole_chosen(typing: Any, table: Any, which: Any) -> Any:
    """Likewise of whole numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _chosen(builder, "llvm.x86.avx512.permvar.si.512", _INTS, args)

    return signature(whole, whole, whole), lower


_BYTES, _SHORTS = ir.VectorType(_BYTE, 4 * SIZE), ir.VectorType(_SHORT, 2 * SIZE)


def _in_turn(builder: Any, kind: Any, a: Any, b: Any, upper: bool) -> Any:
    """The lower, or upper, halves of each sixteen bytes of two registers, element by element in turn."""
    count, each = kind.count, kind.count // 4
    first = each // 2 if upper else 0
    mask = [lane * each + first + i + other for lane in range(4) for i in range(each // 2) for other in (0, count)]
    parts = [builder.bitcast(x, kind) for x in (a, b)]
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_INT, count), mask))


@written
def in_fours(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The bytes of four registers side by side: word 4 j + i of the m-th result has byte 16 j + 4 m + i of each."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        found = []
        for upper in (False, True):
            x, y = (_in_turn(builder, _BYTES, args[k], args[k + 1], upper) for k in (0, 2))
            found += [_in_turn(builder, _SHORTS, x, y, above) for above in (False, True)]
        return context.make_tuple(builder, sig.return_type, [builder.bitcast(v, _INTS) for v in found])

    return signature(types.UniTuple(whole, 4), whole, whole, whole, whole), lower


@written
def word_splat(typing: Any, pointer: Any, index: Any) -> Any:
    """All sixteen the four bytes from the index-th on."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        word = builder.load(_bytes_at(builder, _INT, *args), align=1)
        one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), word, ir.Constant(_INT, 0))
        return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), _all(0))

    return signature(whole, pointer, types.int64), lower


@written
def even_and_odd(typing: Any, a: Any, b: Any) -> Any:
    """Of thirty-two numbers those in even places, and the others."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        parts = [builder.shuffle_vector(*args, ir.Constant(_INTS, list(range(first, 2 * SIZE, 2)))) for first in (0, 1)]
        return context.make_tuple(builder, sig.return_type, parts)

    return signature(types.UniTuple(wide, 2), wide, wide), lower


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen rows of sixteen words: word w of all rows is row w."""

    def two(x: Any, y: Any, *order: int) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(_INTS, list(order)))

    def lanes(*places: int) -> list[int]:
        """Of two registers, of each four words those places, the second one's from 4 on."""
        return [4 * j + (place if place < 4 else SIZE + place - 4) for j in range(4) for place in places]

    for step, low, high in ((1, (0, 4, 1, 5), (2, 6, 3, 7)), (2, (0, 1, 4, 5), (2, 3, 6, 7))):
        found = list(rows)
        for k in range(SIZE):
            if not k & step:
                found[k], found[k + step] = (two(rows[k], rows[k + step], *lanes(*places)) for places in (low, high))
        rows = found
    # Words 4 j + (0, 2, 1, 3)[k] of rows 4 m to 4 m + 3 are in the j-th quarter of the (4 m + k)-th.
    quarters = [
        [j for place in which for j in range(4 * place, 4 * place + 4)] for which in ((0, 2, 4, 6), (1, 3, 5, 7))
    ]
    even_odd = [
        [two(rows[4 * m + k], rows[4 * m + 4 + k], *which) for which in quarters] for m in (0, 2) for k in range(4)
    ]
    found = [rows[0]] * SIZE
    for k, word in enumerate((0, 2, 1, 3)):
        for odd in range(2):
            # Quarters: rows 0 to 3 of words j and j + 2 (in fours), rows 4 to 7 of these.
            x, y = even_odd[k][odd], even_odd[4 + k][odd]
            found[4 * odd + word] = two(x, y, *range(4), *range(8, 12), *range(16, 20), *range(24, 28))
            found[4 * (odd + 2) + word] = two(x, y, *range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32))
    return found


def _turned_rows(builder: Any, source: Any, at: Any, stride: Any) -> list[Any]:
    """Of sixteen rows of 64 bytes, `stride` of them apart: the w-th four bytes of all rows."""
    rows = []
    for n in range(SIZE):
        here = builder.add(at, builder.mul(stride, ir.Constant(_LONG, n)))
        rows.append(builder.load(_bytes_at(builder, _INTS, source, here), align=1))
    return _turned(builder, rows)


@written
def turn_words(typing: Any, source: Any, at: Any, stride: Any, target: Any, to: Any) -> Any:
    """Sixteen rows of 64 bytes, `stride` of them apart: of the w-th four bytes of all rows the lower nibbles come side
    by side from the target's byte `to` + 128 w on, and the upper ones behind these.
    """

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        source, at, stride, target, to = args
        for w, words in enumerate(_turned_rows(builder, source, at, stride)):
            parts = words, builder.lshr(words, _all(4))
            for k, part in enumerate(parts):
                there = builder.add(to, ir.Constant(_LONG, 128 * w + 64 * k))
                builder.store(builder.and_(part, _all(0x0F0F0F0F)), _bytes_at(builder, _INTS, target, there), align=1)
        return context.get_dummy_value()

    return signature(types.none, source, types.int64, types.int64, target, types.int64), lower


@written
def turn_raised(typing: Any, source: Any, at: Any, stride: Any, target: Any, to: Any) -> Any:
    """The same of bytes with a sign, which become 128 higher and have none: the w-th four come to `to` + 128 w."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        use_whole_registers(builder)
        source, at, stride, target, to = args
        for w, words in enumerate(_turned_rows(builder, source, at, stride)):
            there = builder.add(to, ir.Constant(_LONG, 128 * w))
            part = builder.xor(words, _all(0x80808080))
            builder.store(part, _bytes_at(builder, _INTS, target, there), align=1)
        return context.get_dummy_value()

    return signature(types.none, source, types.int64, types.int64, target, types.int64), lower
