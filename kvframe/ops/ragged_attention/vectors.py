"""The two products of attention over a tile of rows, as vector code: rows are made fp32 as they are loaded, a loaded
row serves several queries, and sums stay in registers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvframe.ops.native.numba import FLOAT, INT, LONG, at, load, splat, store

LANES = 16
ROWS = 4  # rows whose sums across lanes are formed together
KIND = ir.VectorType(FLOAT, LANES)


def _row(builder, address, index, kind):
    """16 neighbouring numbers, as fp32. `kind` is how numpy sees them: uint16 is bfloat16, int16 float16."""
    if kind == "float32":
        return load(builder, address, index, KIND)
    bits = 8 if kind == "int8" else 16
    packed, wide = ir.VectorType(ir.IntType(bits), LANES), ir.VectorType(INT, LANES)
    place = builder.bitcast(at(builder, address, index, ir.IntType(bits)), packed.as_pointer())
    found = builder.load(place, align=bits // 8)
    if kind == "int8":
        return builder.sitofp(found, KIND)

    def every(value):
        return ir.Constant(wide, [value] * LANES)

    found = builder.zext(found, wide)
    if kind == "uint16":
        return builder.bitcast(builder.shl(found, every(16)), KIND)
    # The exponent's bias moves from 15 to 127; multiplying does that for subnormal numbers too, but not for infinity.
    size = builder.shl(builder.and_(found, every(0x7FFF)), every(13))
    finite = builder.fmul(builder.bitcast(size, KIND), ir.Constant(KIND, [2.0**112] * LANES))
    ending = builder.icmp_unsigned(">=", size, every(0x7C00 << 13))
    bits32 = builder.select(ending, builder.or_(size, every(0x7F800000)), builder.bitcast(finite, wide))
    sign = builder.shl(builder.and_(found, every(0x8000)), every(16))
    return builder.bitcast(builder.or_(bits32, sign), KIND)


def _index(value):
    return ir.Constant(LONG, value)


def _sums(builder, vectors):
    """The sums over the lanes of four vectors, as one vector of four."""

    def mixed(one, two, lanes):
        return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))

    def folded(one, two, size):
        """Each half of every `2 * size` lanes added to the other: `one`'s sums, then `two`'s, in turn."""
        low = [lane for first in range(0, LANES, 2 * size) for lane in range(first, first + size)]
        low += [lane + LANES for lane in low]
        high = [lane + size for lane in low]
        return builder.fadd(mixed(one, two, low), mixed(one, two, high), flags=["fast"])

    first, second = folded(vectors[0], vectors[1], 8), folded(vectors[2], vectors[3], 8)
    both = folded(first, second, 4)  # four lanes of each vector
    for size in (2, 1):
        turned = [lane ^ size for lane in range(LANES)]
        both = builder.fadd(both, mixed(both, both, turned), flags=["fast"])
    return mixed(both, both, [0, 4, 8, 12])


def _multiply_add(builder, one, two, total):
    return builder.fadd(builder.fmul(one, two, flags=["fast"]), total, flags=["fast"])


@intrinsic(prefer_literal=True)
def score_rows(context, query, keys, quads, logits, stride, queries, dim, kind):
    """Products of `queries` neighbouring queries with `4 * quads` neighbouring keys, `dim` channels each, written to
    `logits` (queries `stride` apart)."""
    signature = types.none(query, keys, quads, logits, stride, queries, dim, kind)
    several, size = queries.literal_value, dim.literal_value

    def generate(context, builder, signature, arguments):
        query, keys, quads, logits, stride = arguments[:5]
        with cgutils.for_range(builder, quads) as loop:
            totals = [[ir.Constant(KIND, [0.0] * LANES)] * ROWS for _ in range(several)]
            first = builder.mul(loop.index, _index(ROWS * size))
            for channel in range(0, size, LANES):
                rows = [
                    _row(builder, keys, builder.add(first, _index(row * size + channel)), kind.literal_value)
                    for row in range(ROWS)
                ]
                for m in range(several):
                    asked = load(builder, query, _index(m * size + channel), KIND)
                    totals[m] = [_multiply_add(builder, asked, row, t) for row, t in zip(rows, totals[m], strict=True)]
            for m in range(several):
                place = builder.add(builder.mul(loop.index, _index(ROWS)), builder.mul(stride, _index(m)))
                store(builder, _sums(builder, totals[m]), logits, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def gather_rows(context, weights, stride, values, rows, held, queries, dim, kind):
    """Add to `held [queries, dim]` the sum of `rows` neighbouring values times their weights (queries `stride`
    apart)."""
    signature = types.none(weights, stride, values, rows, held, queries, dim, kind)
    several, size = queries.literal_value, dim.literal_value

    def generate(context, builder, signature, arguments):
        weights, stride, values, rows, held = arguments[:5]
        places = [(m, channel) for m in range(several) for channel in range(0, size, LANES)]
        sums = {place: cgutils.alloca_once(builder, KIND) for place in places}
        for (m, channel), slot in sums.items():
            builder.store(load(builder, held, _index(m * size + channel), KIND), slot)
        with cgutils.for_range(builder, rows) as loop:
            first = builder.mul(loop.index, _index(size))
            factors = []
            for m in range(several):
                place = builder.add(loop.index, builder.mul(stride, _index(m)))
                factors.append(splat(builder, builder.load(at(builder, weights, place, FLOAT)), LANES))
            for channel in range(0, size, LANES):
                row = _row(builder, values, builder.add(first, _index(channel)), kind.literal_value)
                for m in range(several):
                    slot = sums[m, channel]
                    builder.store(_multiply_add(builder, factors[m], row, builder.load(slot)), slot)
        for (m, channel), slot in sums.items():
            store(builder, builder.load(slot), held, _index(m * size + channel))
        return context.get_dummy_value()

    return signature, generate
