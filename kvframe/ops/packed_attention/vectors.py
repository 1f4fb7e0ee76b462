"""A block of 32 packed rows as vector code: planes of bits to numbers or levels, and the products with them. The lanes
are the rows, so a bit plane is a mask: a number is the sum of its planes' powers of two, a level a tree of choices
between constants."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvframe.ops import lloyd_max
from kvframe.ops.native.numba import FLOAT, INT, LONG, at, load, splat, store

LANES = 32
TREE = 4  # widths up to this have code of their own and choose among constants; wider ones look their level up
ROW = ir.VectorType(FLOAT, LANES)


def _constant(value):
    return ir.Constant(ROW, [float(value)] * LANES)


def _meant(builder, words, first, stride, width, known, levels, table):
    """What the codes of a channel stand for, in 32 lanes; its planes are the words `first + plane * stride`. `known` is
    the width as a Python integer, or None if it is `width`, beyond TREE."""
    mask = ir.VectorType(ir.IntType(1), LANES)

    def plane(number):
        index = builder.add(first, builder.mul(stride, number))
        return builder.bitcast(builder.load(at(builder, words, index, INT)), mask)

    if known is not None and levels:
        found = [_constant(np.float32(x)) for x in lloyd_max.normal_levels(known).float().tolist()]
        for number in range(known):
            bit = plane(ir.Constant(LONG, number))
            found = [builder.select(bit, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        return found[0]
    if known is not None:
        total = _constant(0)
        for number in range(known):
            part = builder.select(plane(ir.Constant(LONG, number)), _constant(2**number), _constant(0))
            total = builder.fadd(total, part, flags=["fast"])
        return total
    numbers = ir.VectorType(INT, LANES)
    code, weight = cgutils.alloca_once(builder, numbers), cgutils.alloca_once(builder, numbers)
    builder.store(ir.Constant(numbers, [0] * LANES), code)
    builder.store(ir.Constant(numbers, [1] * LANES), weight)
    with cgutils.for_range(builder, width) as loop:
        one = builder.load(weight)
        part = builder.select(plane(loop.index), one, ir.Constant(numbers, [0] * LANES))
        builder.store(builder.add(builder.load(code), part), code)
        builder.store(builder.add(one, one), weight)
    if not levels:
        return builder.uitofp(builder.load(code), ROW)
    codes, start = builder.load(code), builder.sub(builder.shl(ir.Constant(LONG, 1), width), ir.Constant(LONG, 1))
    out = ir.Constant(ROW, ir.Undefined)
    for lane in range(LANES):
        place = ir.Constant(INT, lane)
        index = builder.add(start, builder.zext(builder.extract_element(codes, place), LONG))
        out = builder.insert_element(out, builder.load(at(builder, table, index, FLOAT)), place)
    return out


def _each_width(builder, width, body):
    """Code for every width up to TREE, and for wider ones (None), of which one runs."""
    end, wider = builder.append_basic_block("done"), builder.append_basic_block("wider")
    choice = builder.switch(width, wider)
    for number in [*range(1, TREE + 1), None]:
        block = wider if number is None else builder.append_basic_block(f"width{number}")
        if number is not None:
            choice.add_case(ir.Constant(LONG, number), block)
        builder.position_at_end(block)
        body(number)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic(prefer_literal=True)
def score_segment(context, words, first, count, width, query, stride, sums, table, queries, levels):
    """Add to `sums [queries, 32]` the products of queries (`stride` apart) with one block of one segment: `count`
    channels of `width` bits whose words begin at `first`."""
    signature = types.none(words, first, count, width, query, stride, sums, table, queries, levels)
    rows, leveled = queries.literal_value, levels.literal_value

    def generate(context, builder, signature, arguments):
        words, first, count, width, query, stride, sums, table = arguments[:8]

        def body(number):
            held = [cgutils.alloca_once(builder, ROW) for _ in range(rows)]
            for m, slot in enumerate(held):
                builder.store(load(builder, sums, ir.Constant(LONG, m * LANES), ROW), slot)
            with cgutils.for_range(builder, count) as loop:
                meant = _meant(builder, words, builder.add(first, loop.index), count, width, number, leveled, table)
                for m, slot in enumerate(held):
                    index = builder.add(loop.index, builder.mul(stride, ir.Constant(LONG, m)))
                    factor = splat(builder, builder.load(at(builder, query, index, FLOAT)), LANES)
                    product = builder.fmul(factor, meant, flags=["fast"])
                    builder.store(builder.fadd(builder.load(slot), product, flags=["fast"]), slot)
            for m, slot in enumerate(held):
                store(builder, builder.load(slot), sums, ir.Constant(LONG, m * LANES))

        _each_width(builder, width, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def gather_segment(
    context, words, first, count, width, block, blocks, weights, tile, out, stride, table, queries, levels
):
    """Add to `out` (queries `stride` apart) the sums over all lanes of `blocks` blocks, `block` words apart, of weights
    (queries `tile` apart) times what the codes of one segment stand for."""
    signature = types.none(
        words, first, count, width, block, blocks, weights, tile, out, stride, table, queries, levels
    )
    rows, leveled = queries.literal_value, levels.literal_value

    def generate(context, builder, signature, arguments):
        words, first, count, width, block, blocks, weights, tile, out, stride, table = arguments[:11]
        kind = ir.FunctionType(FLOAT, [FLOAT, ROW])
        across = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")

        def body(number):
            held = [cgutils.alloca_once(builder, ROW) for _ in range(rows)]
            with cgutils.for_range(builder, count) as channel:
                for slot in held:
                    builder.store(_constant(0), slot)
                with cgutils.for_range(builder, blocks) as loop:
                    place = builder.add(builder.add(first, channel.index), builder.mul(loop.index, block))
                    meant = _meant(builder, words, place, count, width, number, leveled, table)
                    for m, slot in enumerate(held):
                        index = builder.add(
                            builder.mul(loop.index, ir.Constant(LONG, LANES)),
                            builder.mul(tile, ir.Constant(LONG, m)),
                        )
                        product = builder.fmul(load(builder, weights, index, ROW), meant, flags=["fast"])
                        builder.store(builder.fadd(builder.load(slot), product, flags=["fast"]), slot)
                for m, slot in enumerate(held):
                    total = builder.call(across, [ir.Constant(FLOAT, 0.0), builder.load(slot)], fastmath=["fast"])
                    index = builder.add(channel.index, builder.mul(stride, ir.Constant(LONG, m)))
                    target = at(builder, out, index, FLOAT)
                    builder.store(builder.fadd(builder.load(target), total, flags=["fast"]), target)

        _each_width(builder, width, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def unpack_segment(context, words, first, count, width, out, table, levels):
    """Write what the codes of one block of one segment stand for, `[count, 32]`."""
    signature = types.none(words, first, count, width, out, table, levels)

    def generate(context, builder, signature, arguments):
        words, first, count, width, out, table = arguments[:6]

        def body(number):
            with cgutils.for_range(builder, count) as loop:
                place = builder.add(first, loop.index)
                meant = _meant(builder, words, place, count, width, number, levels.literal_value, table)
                store(builder, meant, out, builder.mul(loop.index, ir.Constant(LONG, LANES)))

        _each_width(builder, width, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def multiply(context, rows, count, matrix, stride, out, several, add):
    """Products of `count` rows of 32 lanes with `several` neighbouring columns of a matrix, its rows `stride` apart,
    written to `out [several, 32]`; or, to `add`, with queries `stride` apart, added to it."""
    signature = types.none(rows, count, matrix, stride, out, several, add)
    added = add.literal_value

    def generate(context, builder, signature, arguments):
        rows, count, matrix, stride, out = arguments[:5]
        held = [cgutils.alloca_once(builder, ROW) for _ in range(several.literal_value)]
        for m, slot in enumerate(held):
            start = load(builder, out, ir.Constant(LONG, m * LANES), ROW) if added else _constant(0)
            builder.store(start, slot)
        with cgutils.for_range(builder, count) as loop:
            row = load(builder, rows, builder.mul(loop.index, ir.Constant(LONG, LANES)), ROW)
            for m, slot in enumerate(held):
                number = ir.Constant(LONG, m)
                # Column `m` of row `index`, or element `index` of query `m`.
                outer, inner = (number, loop.index) if added else (loop.index, number)
                place = builder.add(builder.mul(outer, stride), inner)
                factor = splat(builder, builder.load(at(builder, matrix, place, FLOAT)), LANES)
                product = builder.fmul(factor, row, flags=["fast"])
                builder.store(builder.fadd(builder.load(slot), product, flags=["fast"]), slot)
        for m, slot in enumerate(held):
            store(builder, builder.load(slot), out, ir.Constant(LONG, m * LANES))
        return context.get_dummy_value()

    return signature, generate
