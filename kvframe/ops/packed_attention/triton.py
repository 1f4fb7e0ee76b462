"""Attention in code space in Triton: a program unpacks blocks of 32 rows as it goes, for all queries of a pair."""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.launch import beside_its_tensors
from kvframe.ops.packed_attention.layout import Packed, PackedRows, channel_table, level_table
from kvframe.ops.ragged_attention.triton import cap, merge_kernel

# Sizes for which no target spills registers: queries of a program, key channels at once, value channels of a program,
# and warps.
BLOCK_M = 16
BLOCK_K = 32
BLOCK_V = 256
WARPS = 4
SPLIT = 16  # blocks of one program; more programs for longer pairs


@triton.jit
def load_codes(words, table, levels, base, channels, known, widest, LEVELS: tl.constexpr):
    """What the codes of some channels of one block stand for, fp32 `[32, channels]`."""
    lane = tl.arange(0, 32)
    first = tl.load(table + channels * 3, mask=known, other=0)
    stride = tl.load(table + channels * 3 + 1, mask=known, other=0)
    width = tl.load(table + channels * 3 + 2, mask=known, other=0)
    code = (lane[:, None] * 0) + (channels[None, :] * 0)
    for plane in range(widest):
        word = tl.load(words + base + first + plane * stride, mask=known & (plane < width), other=0)
        code |= ((word[None, :] >> lane[:, None]) & 1) << plane
    if LEVELS:
        start = (1 << width) - 1
        return tl.load(levels + start[None, :] + code, mask=known[None, :] & (lane[:, None] >= 0), other=0.0)
    return code.to(tl.float32)


@triton.jit
def load_scales(scales, table, rows, inside, BYTES: tl.constexpr):
    """The scales of rows, fp32."""
    stored = tl.load(scales + rows, mask=inside, other=0)
    if BYTES:
        return tl.load(table + stored.to(tl.int32), mask=inside, other=0.0)
    return stored.to(tl.float32)


@triton.jit
def attend_kernel(
    query,  # fp32 [P, M, C]
    constant,  # fp32 [P, M]
    shift,  # fp32 [P, M], read if CAPS
    key_words,
    value_words,
    key_scales,
    value_scales,
    key_scale_table,  # fp32 [groups, 256]
    value_scale_table,
    key_table,  # int32 [groups, C, 3]
    value_table,  # int32 [groups, C', 3]
    levels,  # fp32
    places,  # int64 [P, 5]
    log_multiplicity,  # fp32 [N]
    offsets,  # int64 [P * heads + 1]
    out,  # fp32 [S, P, M, C' + 1]
    lse,  # fp32 [S, P, M]
    n_pairs,
    n_queries,
    groups,
    heads,
    key_channels,
    value_channels,
    key_widest,
    value_widest,
    split,
    softcap,  # fp32, read if CAPS
    KEY_LEVELS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    BYTES: tl.constexpr,
    CAPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program for one pair, one split of its blocks, and one block of its queries and of its value channels: online
    softmax."""
    pair = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    chunks = tl.maximum(1, (value_channels + BLOCK_V - 1) // BLOCK_V)
    m = tl.program_id(2) // chunks * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(2) % chunks * BLOCK_V + tl.arange(0, BLOCK_V)
    asked = m < n_queries
    group = pair % groups
    n_rows = tl.load(places + pair * 5)
    first_row = tl.load(places + pair * 5 + 1)
    key_base = tl.load(places + pair * 5 + 2)
    value_base = tl.load(places + pair * 5 + 3)
    key_block = 0
    value_block = 0
    key_table += group * key_channels * 3
    value_table += group * value_channels * 3
    # A block's words are those of the last channel's last plane, and all before it.
    for channel in range(key_channels):
        key_block += tl.load(key_table + channel * 3 + 2)
    for channel in range(value_channels):
        value_block += tl.load(value_table + channel * 3 + 2)
    add = tl.load(constant + pair * n_queries + m, mask=asked, other=0.0)
    if CAPS:
        common = tl.load(shift + pair * n_queries + m, mask=asked, other=0.0)
    lane = tl.arange(0, 32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scaled = tl.zeros([BLOCK_M], tl.float32)
    held = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin = part * split
    end = tl.minimum((n_rows + 31) // 32, begin + split)
    for block in range(begin, end):
        rows = block * 32 + lane
        inside = rows < n_rows
        logits = tl.zeros([BLOCK_M, 32], tl.float32)
        for first in range(0, key_channels, BLOCK_K):
            channels = first + tl.arange(0, BLOCK_K)
            known = channels < key_channels
            place = (pair * n_queries + m)[:, None] * key_channels + channels[None, :]
            q = tl.load(query + place, mask=asked[:, None] & known[None, :], other=0.0)
            base = key_base + block * key_block
            keys = load_codes(key_words, key_table, levels, base, channels, known, key_widest, KEY_LEVELS)
            # Products in full fp32: tf32 would cost three digits of every logit.
            logits += tl.dot(q, tl.trans(keys), input_precision="ieee")
        factor = load_scales(key_scales, key_scale_table + group * 256, first_row + rows, inside, BYTES)
        logits = (logits + add[:, None]) * factor[None, :]
        if CAPS:
            logits = cap(logits + common[:, None], softcap)
        if WEIGHTED:
            start = tl.load(offsets + pair * heads + m // (n_queries // heads), mask=asked, other=0)
            seen = asked[:, None] & inside[None, :]
            logits += tl.load(log_multiplicity + start[:, None] + rows[None, :], mask=seen, other=0.0)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp(logits - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        factor = load_scales(value_scales, value_scale_table + group * 256, first_row + rows, inside, BYTES)
        weights = weights * factor[None, :]
        scaled = scaled * shrink + tl.sum(weights, axis=1)
        known = column < value_channels
        base = value_base + block * value_block
        values = load_codes(value_words, value_table, levels, base, column, known, value_widest, VALUE_LEVELS)
        held = held * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        top = higher
    filled = total > 0
    safe = tl.where(filled, total, 1.0)
    place = (part * n_pairs + pair) * n_queries + m
    target = out + place[:, None] * (value_channels + 1) + column[None, :]
    tl.store(target, held / safe[:, None], mask=asked[:, None] & (column < value_channels)[None, :])
    tl.store(out + place * (value_channels + 1) + value_channels, scaled / safe, mask=asked)
    tl.store(lse + place, tl.where(filled, top + tl.log(safe), float("-inf")), mask=asked)


@beside_its_tensors
def packed_attention(
    query: Tensor,
    constant: Tensor,
    keys: Packed,
    values: Packed,
    rows: PackedRows,
    softcap: float | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the package's `packed_attention`."""
    if not query.is_cuda and not triton.knobs.runtime.interpret:
        raise InputError(
            f"The triton kernel runs on CUDA devices, but the query is on {query.device}; use attention: auto."
        )
    pairs, queries, key_channels = query.shape
    places, bounds = rows.places(keys, values)
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    splits, width = max(1, triton.cdiv(longest, SPLIT)), values.channels
    out = torch.empty(splits, pairs, queries, width + 1, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, pairs, queries, dtype=torch.float32, device=query.device)
    unused = query.new_zeros(1)
    given = [
        *(query.contiguous(), constant.contiguous(), unused if shift is None else shift.contiguous()),
        *(keys.words, values.words, keys.scales, values.scales),
        *(unused if side.scale_table is None else side.scale_table for side in (keys, values)),
        *(channel_table(side.segments, query.device) for side in (keys, values)),
        *(level_table(query.device), places),
        *(unused if rows.log_multiplicity is None else rows.log_multiplicity, rows.offsets, out, lse),
    ]
    widest = [max((w for group in side.segments for w, _ in group), default=0) for side in (keys, values)]
    sizes = (pairs, queries, rows.groups, rows.heads, key_channels, width, *widest, SPLIT, softcap or 0.0)
    block_v = min(BLOCK_V, triton.next_power_of_2(max(16, width)))
    chunks = max(1, triton.cdiv(width, block_v))
    attend_kernel[(pairs, splits, triton.cdiv(queries, BLOCK_M) * chunks)](
        *given,
        *sizes,
        KEY_LEVELS=keys.levels,
        VALUE_LEVELS=values.levels,
        BYTES=keys.scale_table is not None,
        CAPS=softcap is not None,
        WEIGHTED=rows.log_multiplicity is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_K=BLOCK_K,
        BLOCK_V=block_v,
        num_warps=WARPS,
    )
    if splits == 1:
        return out[0], lse[0]
    merged, merged_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
    merge_kernel[(triton.cdiv(pairs * queries, 16),)](
        *(out, lse, merged, merged_lse, pairs * queries, splits),
        DIM=width + 1,
        BLOCK_D=triton.next_power_of_2(max(16, width + 1)),
        BLOCK_P=16,
    )
    return merged, merged_lse
