"""In one pass over packed codes on a CPU. The lanes of the vector unit are the 32 rows of a block, so a bit plane is a
mask: a number is the sum of its planes' powers of two, a level a tree of choices between constants. Nothing is unpacked
to integers, and no sum runs across lanes except one for a channel and a tile."""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import lloyd_max
from kvframe.ops.native.numba import (
    FAST,
    FLOAT,
    INT,
    LONG,
    as_float,
    at,
    compiled,
    f32,
    load,
    pointer,
    softmax,
    splat,
    store,
    take,
)
from kvframe.ops.packed_attention.layout import MAX_SEGMENTS, Packed, PackedRows, Rebuild, level_table
from kvframe.ops.ragged_attention.numba import attended

LANES = 32
TILE = 16  # blocks attended at once: their weights stay in the first-level cache
AT_ONCE = (9, 8, 4, 3, 1)  # numbers of queries whose sums stay in registers; the first that divides is taken
COLUMNS = 8  # channels of keys that are rebuilt at once
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


@njit(fastmath=FAST)
def turn(keys, scale, first, center, cos, sin, heads):
    """Scale and rotate the keys of a block, `[n * D, 32]`, in place."""
    dim, half = keys.shape[0] // heads, cos.shape[0]
    for channel in range(keys.shape[0]):
        for lane in range(LANES):
            keys[channel, lane] = (keys[channel, lane] + first[channel]) * scale[lane] + center[channel]
    for head in range(heads):
        for i in range(half):
            one, two = keys[head * dim + i], keys[head * dim + half + i]
            for lane in range(LANES):
                low, high = one[lane], two[lane]
                one[lane] = low * cos[i, lane] - high * sin[i, lane]
                two[lane] = high * cos[i, lane] + low * sin[i, lane]


@cache
def attend_kernel(at_once: int, key_levels: bool, value_levels: bool, rebuilt: bool):
    """The kernel that takes so many queries of a pair at once; `rebuilt` keys are made and rotated on the way."""
    span = TILE * LANES

    def kernel(arguments):
        a = carray(arguments, (35,))
        n_items, pairs, queries, groups = a[1], a[2], a[3], a[4]
        heads, key_channels, value_channels = a[7], a[8], a[9]
        items = carray(pointer(a[5]), (n_items, 3), np.int64)
        query = a[6]
        constant = carray(pointer(a[10]), (pairs, queries), f32)
        places = carray(pointer(a[11]), (pairs, 5), np.int64)
        key_segments = carray(pointer(a[12]), (groups, MAX_SEGMENTS, 2), np.int64)
        value_segments = carray(pointer(a[13]), (groups, MAX_SEGMENTS, 2), np.int64)
        key_words, value_words, table = a[14], a[15], a[20]
        entries = a[21]
        brain_keys = carray(pointer(a[16]), (entries,), np.uint16)
        byte_keys = carray(pointer(a[16]), (entries,), np.uint8)
        brain_values = carray(pointer(a[17]), (entries,), np.uint16)
        byte_values = carray(pointer(a[17]), (entries,), np.uint8)
        key_table = carray(pointer(a[18]), (groups, 256), f32)
        value_table = carray(pointer(a[19]), (groups, 256), f32)
        bias = carray(pointer(a[22]), (entries * heads,), f32)
        offsets = carray(pointer(a[23]), (pairs * heads + 1,), np.int64)
        dim, half, table_length = a[24], a[25], a[26]
        key_dim = heads * dim
        synthesis = a[27]
        first_level = carray(pointer(a[28]), (groups, key_dim), f32)
        center = carray(pointer(a[29]), (groups, key_dim), f32)
        positions = carray(pointer(a[30]), (entries,), np.int32)
        cos = carray(pointer(a[31]), (table_length, half), f32)
        sin = carray(pointer(a[32]), (table_length, half), f32)
        out = carray(pointer(a[33]), (n_items, queries, value_channels + 1), f32)
        lse = carray(pointer(a[34]), (n_items, queries), f32)
        logits = np.empty((queries, span), f32)
        sums = np.empty((queries, LANES), f32)
        factor = np.empty(span, f32)
        latent = np.empty((key_channels if rebuilt else 1, LANES), f32)
        keys = np.empty((key_dim, LANES), f32)
        turns = np.empty((2, half, LANES), f32)
        state = np.empty((queries, 2), f32)
        while True:
            item = take(a[0])
            if item >= n_items:
                break
            pair, start, stop = items[item, 0], items[item, 1], items[item, 2]
            group, rows, first_row = pair % groups, places[pair, 0], places[pair, 1]
            start, stop = start - places[pair, 4], stop - places[pair, 4]
            key_block, value_block = 0, 0
            for s in range(MAX_SEGMENTS):
                key_block += key_segments[group, s, 0] * key_segments[group, s, 1]
                value_block += value_segments[group, s, 0] * value_segments[group, s, 1]
            held = out[item]
            held[:] = f32(0.0)
            state[:, 0] = f32(-np.inf)
            state[:, 1] = f32(0.0)
            for tile in range(start, stop, TILE):
                blocks = min(TILE, stop - tile)
                begin = tile * LANES
                n = min(blocks * LANES, rows - begin)
                for j in range(n):
                    if a[18] != 0:
                        factor[j] = key_table[group, byte_keys[first_row + begin + j]]
                    else:
                        bits = np.uint32(brain_keys[first_row + begin + j]) << np.uint32(16)
                        factor[j] = as_float(np.int32(bits))
                for block in range(blocks):
                    for m in range(queries):
                        for lane in range(LANES):
                            sums[m, lane] = constant[pair, m]
                    word, channel = places[pair, 2] + (tile + block) * key_block, 0
                    for s in range(MAX_SEGMENTS):
                        width, count = key_segments[group, s, 0], key_segments[group, s, 1]
                        if count == 0:
                            break
                        if rebuilt:
                            unpack_segment(
                                key_words, word, count, width, latent[channel].ctypes.data, table, key_levels
                            )
                        for m in range(0, 0 if rebuilt else queries, at_once):
                            score_segment(
                                key_words,
                                word,
                                count,
                                width,
                                query + 4 * ((pair * queries + m) * key_channels + channel),
                                key_channels,
                                sums.ctypes.data + 4 * m * LANES,
                                table,
                                at_once,
                                key_levels,
                            )
                        word += width * count
                        channel += count
                    if rebuilt:
                        for x in range(0, key_dim, COLUMNS):
                            start = synthesis + 4 * (group * key_channels * key_dim + x)
                            multiply(latent.ctypes.data, channel, start, key_dim, keys[x].ctypes.data, COLUMNS, False)
                        for lane in range(LANES):
                            j = block * LANES + lane
                            position = positions[first_row + begin + j] if j < n else np.int32(0)
                            for i in range(half):
                                turns[0, i, lane] = cos[position, i]
                                turns[1, i, lane] = sin[position, i]
                        scale = factor[block * LANES : (block + 1) * LANES]
                        turn(keys, scale, first_level[group], center[group], turns[0], turns[1], heads)
                        for m in range(0, queries, at_once):
                            head = m // (queries // heads)
                            asked = query + 4 * (pair * queries + m) * dim
                            multiply(keys[head * dim].ctypes.data, dim, asked, dim, sums[m].ctypes.data, at_once, True)
                    for m in range(queries):
                        for lane in range(LANES):
                            logits[m, block * LANES + lane] = sums[m, lane]
                for m in range(queries):
                    row = logits[m]
                    if not rebuilt:
                        for j in range(n):
                            row[j] *= factor[j]
                    if a[22] != 0:
                        at = offsets[pair * heads + m // (queries // heads)] + begin
                        for j in range(n):
                            row[j] += bias[at + j]
                    state[m, 0], state[m, 1] = softmax(row, n, state[m, 0], state[m, 1], held[m])
                for j in range(n):
                    if a[19] != 0:
                        factor[j] = value_table[group, byte_values[first_row + begin + j]]
                    else:
                        bits = np.uint32(brain_values[first_row + begin + j]) << np.uint32(16)
                        factor[j] = as_float(np.int32(bits))
                for m in range(queries):
                    row = logits[m]
                    scales = f32(0.0)
                    for j in range(n):
                        row[j] *= factor[j]
                        scales += row[j]
                    for j in range(n, blocks * LANES):
                        row[j] = f32(0.0)
                    held[m, value_channels] += scales
                word, channel = places[pair, 3] + tile * value_block, 0
                for s in range(MAX_SEGMENTS):
                    width, count = value_segments[group, s, 0], value_segments[group, s, 1]
                    if count == 0:
                        break
                    for m in range(0, queries, at_once):
                        gather_segment(
                            value_words,
                            word,
                            count,
                            width,
                            value_block,
                            blocks,
                            logits.ctypes.data + 4 * m * span,
                            span,
                            held.ctypes.data + 4 * (m * (value_channels + 1) + channel),
                            value_channels + 1,
                            table,
                            at_once,
                            value_levels,
                        )
                    word += width * count
                    channel += count
            for m in range(queries):
                total = state[m, 1]
                for x in range(value_channels + 1):
                    held[m, x] = held[m, x] / total if total > 0 else f32(0.0)
                lse[item, m] = state[m, 0] + f32(np.log(total)) if total > 0 else f32(-np.inf)

    return compiled(kernel)


def packed_attention(
    query: Tensor, constant: Tensor, keys: Packed, values: Packed, rows: PackedRows, rebuild: Rebuild | None = None
) -> tuple[Tensor, Tensor]:
    """See the package's `packed_attention`."""
    if query.device.type != "cpu":
        raise InputError(f"The cpu kernel runs on the CPU, but the query is on {query.device}; use attention: auto.")
    places, bounds = rows.places(keys, values)
    query, constant, offsets = query.contiguous(), constant.contiguous(), rows.offsets.long().contiguous()
    count = None if rows.log_multiplicity is None else rows.log_multiplicity.float().contiguous()
    sharing = query.shape[1] if rebuild is None else query.shape[1] // rows.heads
    at_once = next(n for n in AT_ONCE if sharing % n == 0)
    kernel = attend_kernel(at_once, keys.levels, values.levels, rebuild is not None)
    if rebuild is None:
        extra: tuple[Tensor | int, ...] = (0,) * 9
    else:
        if query.shape[2] * rows.heads % COLUMNS:
            raise InputError(f"The cpu kernel rebuilds keys of {COLUMNS} channels or multiples; use attention: sdpa.")
        parts = (rebuild.synthesis, rebuild.first, rebuild.center, rebuild.positions, rebuild.cos, rebuild.sin)
        extra = (query.shape[2], rebuild.cos.shape[1], len(rebuild.cos), *(part.contiguous() for part in parts))
    given = (
        *(rows.heads, keys.channels, values.channels, constant, places, keys.table, values.table),
        *(keys.words, values.words, keys.scales, values.scales, keys.scale_table, values.scale_table),
        *(level_table(query.device), len(keys.scales), count, offsets),
        *extra,
    )
    return attended(kernel, query, bounds, values.channels + 1, TILE, rows.groups, given)
