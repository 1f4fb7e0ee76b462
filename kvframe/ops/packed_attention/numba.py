"""In one pass over packed codes on a CPU. The lanes of the vector unit are the 32 rows of a block, so a bit plane is a
mask: a number is the sum of its planes' powers of two, a level a tree of choices between constants. Nothing is unpacked
to integers, and no sum runs across lanes except one for a channel and a tile."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numba import carray, njit
from torch import Tensor
from torch.nn.functional import pad

from kvframe.errors import InputError
from kvframe.ops import native
from kvframe.ops.native.numba import (
    FAST,
    as_float,
    cap,
    compiled,
    f32,
    pointer,
    softmax,
    take,
)
from kvframe.ops.packed_attention.layout import MAX_SEGMENTS, Packed, PackedRows, Rebuild, level_table
from kvframe.ops.packed_attention.vectors import LANES, gather_segment, multiply, score_segment, unpack_segment
from kvframe.ops.ragged_attention.numba import attended

TILE = 16  # blocks attended at once: their weights stay in the first-level cache
AT_ONCE = (9, 8, 4, 3, 1)  # numbers of queries whose sums stay in registers; the first that divides is taken
COLUMNS = 8  # channels of keys that are rebuilt at once


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
def attend_kernel(at_once: int, key_levels: bool, value_levels: bool, rebuilt: bool, caps: bool):
    """The kernel that takes so many queries of a pair at once; `rebuilt` keys are made and rotated on the way; it
    `caps` logits or leaves them."""
    span = TILE * LANES

    def kernel(arguments):
        a = carray(arguments, (37,))
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
        softcap = as_float(np.int32(a[33]))
        shift = carray(pointer(a[34]), (pairs, queries), f32)
        out = carray(pointer(a[35]), (n_items, queries, value_channels + 1), f32)
        lse = carray(pointer(a[36]), (n_items, queries), f32)
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
                    if caps:
                        for j in range(n):
                            row[j] += shift[pair, m]
                        cap(row, n, softcap)
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


def _whole(query: Tensor, rebuild: Rebuild, heads: int) -> tuple[Tensor, Rebuild]:
    """Queries and keys with channels of zeros behind each head's, so that all can be rebuilt COLUMNS at a time."""
    dim = query.shape[2]
    if dim * heads % COLUMNS == 0:
        return query, rebuild

    def wider(matrix: Tensor) -> Tensor:
        return pad(matrix.unflatten(-1, (heads, dim)), (0, -dim % COLUMNS)).flatten(-2)

    made = {name: wider(getattr(rebuild, name)) for name in ("synthesis", "first", "center")}
    return pad(query, (0, -dim % COLUMNS)).contiguous(), replace(rebuild, **made)


def packed_attention(
    query: Tensor,
    constant: Tensor,
    keys: Packed,
    values: Packed,
    rows: PackedRows,
    softcap: float | None = None,
    shift: Tensor | None = None,
    rebuild: Rebuild | None = None,
) -> tuple[Tensor, Tensor]:
    """See the package's `packed_attention`."""
    if query.device.type != "cpu":
        raise InputError(f"The cpu kernel runs on the CPU, but the query is on {query.device}; use attention: auto.")
    places, bounds = rows.places(keys, values)
    query, constant, offsets = query.contiguous(), constant.contiguous(), rows.offsets.long().contiguous()
    count = None if rows.log_multiplicity is None else rows.log_multiplicity.float().contiguous()
    sharing = query.shape[1] if rebuild is None else query.shape[1] // rows.heads
    at_once = next(n for n in AT_ONCE if sharing % n == 0)
    kernel = attend_kernel(at_once, keys.levels, values.levels, rebuild is not None, softcap is not None)
    if rebuild is None:
        extra: tuple[Tensor | int, ...] = (0,) * 9
    else:
        query, rebuild = _whole(query, rebuild, rows.heads)
        parts = (rebuild.synthesis, rebuild.first, rebuild.center, rebuild.positions, rebuild.cos, rebuild.sin)
        extra = (query.shape[2], rebuild.cos.shape[1], len(rebuild.cos), *(part.contiguous() for part in parts))
    given = (
        *(rows.heads, keys.channels, values.channels, constant, places, keys.table, values.table),
        *(keys.words, values.words, keys.scales, values.scales, keys.scale_table, values.scale_table),
        *(level_table(query.device), len(keys.scales), count, offsets),
        *extra,
        *(None if softcap is None else native.bits(softcap), None if shift is None else shift.contiguous()),
    )
    return attended(kernel, query, bounds, values.channels + 1, TILE, rows.groups, given)
