"""Ragged attention in Triton: split over entries for decoding, the query heads of a group share each load, one loop for
every format. A format brings a loader; the loop, the split and the merge stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.launch import beside_its_tensors
from kvframe.types import Encoded

# Entries that a program holds at once, and its warps: the largest for which no target spills registers.
BLOCK_N = 32
WARPS = 4
SPLIT = 512  # entries of one program; more programs for longer heads


@triton.jit
def load_dense(codes, which: tl.constexpr, rows, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of dense keys (`which` 0) or values (1) as `[BLOCK_N, BLOCK_D]`, in their own dtype."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < DIM)[None, :]
    return tl.load(codes[which] + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_int8(codes, which: tl.constexpr, rows, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of int8 codes times their scale, as fp32 `[BLOCK_N, BLOCK_D]`; codes are (keys, values, and their
    scales)."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < DIM)[None, :]
    code = tl.load(codes[which] + rows[:, None] * DIM + columns[None, :], mask=mask, other=0).to(tl.float32)
    scale = tl.load(codes[which + 2] + rows, mask=inside, other=0.0).to(tl.float32)
    return code * scale[:, None]


@triton.jit
def cap(logits, softcap):
    """Logits within plus and minus a cap, `softcap * tanh(logits / softcap)`; the exponential cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(logits / softcap))
    size = softcap * ((1.0 - e) / (1.0 + e))
    return tl.where(logits < 0, -size, size)


@triton.jit
def attend_kernel(
    query,  # [B*H, M, D], the queries of the G heads that share a KV head
    codes,  # tuple of pointers, for the loader
    log_multiplicity,  # fp32 [N]
    offsets,  # int64 [B*H+1]
    out,  # fp32 [S, B*H, M, D]
    lse,  # fp32 [S, B*H, M]
    scale,
    softcap,  # fp32, read if CAPS
    n_pairs,
    n_queries,
    split,
    LOAD: tl.constexpr,
    CAPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for one (b, h), one block of its queries and one split of its entries: online softmax over tiles."""
    pair = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    known = lanes < n_queries
    at = (pair * n_queries + lanes)[:, None] * DIM + columns[None, :]
    q = tl.load(query + at, mask=known[:, None] & (columns < DIM)[None, :], other=0.0)
    begin = tl.load(offsets + pair) + part * split
    end = tl.minimum(tl.load(offsets + pair + 1), begin + split)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    held = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        inside = rows < end
        keys = LOAD(codes, 0, rows, inside, DIM, BLOCK_D).to(q.dtype)
        # Products in full fp32: tf32 would cost three digits of every logit.
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if CAPS:
            logits = cap(logits, softcap)
        if WEIGHTED:
            logits += tl.load(log_multiplicity + rows, mask=inside, other=0.0)[None, :]
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp(logits - higher[:, None])
        shrink = tl.exp(top - higher)
        values = LOAD(codes, 1, rows, inside, DIM, BLOCK_D).to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        held = held * shrink[:, None] + tl.dot(weights.to(q.dtype), values, input_precision="ieee")
        top = higher
    filled = total > 0
    held = held / tl.where(filled, total, 1.0)[:, None]
    place = (part * n_pairs + pair) * n_queries + lanes
    tl.store(out + place[:, None] * DIM + columns[None, :], held, mask=known[:, None] & (columns < DIM)[None, :])
    tl.store(lse + place, tl.where(filled, top + tl.log(tl.where(filled, total, 1.0)), float("-inf")), mask=known)


@triton.jit
def merge_kernel(
    outs,  # fp32 [S, P, D], P rows in all
    lses,  # fp32 [S, P]
    out,  # fp32 [P, D]
    lse,  # fp32 [P]
    n_rows,
    n_splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge the splits of BLOCK_P rows by their log-sum-exps."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_D)
    known = rows < n_rows
    mask = known[:, None] & (columns < DIM)[None, :]
    top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    held = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for split in range(n_splits):
        one = tl.load(lses + split * n_rows + rows, mask=known, other=float("-inf"))
        higher = tl.maximum(top, one)
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        weight = tl.exp(one - safe)
        shrink = tl.exp(top - safe)
        piece = tl.load(outs + (split * n_rows + rows)[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
        total = total * shrink + weight
        held = held * shrink[:, None] + piece * weight[:, None]
        top = higher
    filled = total > 0
    tl.store(out + rows[:, None] * DIM + columns[None, :], held / tl.where(filled, total, 1.0)[:, None], mask=mask)
    tl.store(lse + rows, tl.where(filled, top + tl.log(tl.where(filled, total, 1.0)), float("-inf")), mask=known)


LOADERS: dict[str, tuple[Callable, Sequence[str]]] = {
    "dense": (load_dense, ("keys", "values")),
    "int8": (load_int8, ("keys", "values", "keys_scale", "values_scale")),
}


@beside_its_tensors
def ragged_attention(
    query: Tensor, encoded: Encoded, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend codes where they lie; contract as `Kernel.attend`, with the codes of a format in LOADERS.

    Raises InputError for a format without a loader, tensors that are not contiguous, a query in fp64, or a device
    without Triton."""
    if encoded.format not in LOADERS:
        raise InputError(
            f"The triton kernel has no loader for the format '{encoded.format}' (it has: {', '.join(LOADERS)}); "
            "use attention: auto."
        )
    loader, names = LOADERS[encoded.format]
    codes = tuple(encoded.codes[name] for name in names)
    for name, tensor in zip(names, codes, strict=True):
        if not tensor.is_contiguous():
            raise InputError(
                f"The triton kernel needs contiguous codes, but '{name}' is not; call .contiguous() on it."
            )
    if not query.is_cuda and not triton.knobs.runtime.interpret:
        raise InputError(
            f"The triton kernel runs on CUDA devices, but the query is on {query.device}; use attention: auto."
        )
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(
            f"The triton kernel takes queries in fp32, bf16 or fp16, not {query.dtype}; use attention: auto."
        )
    batch, query_heads, length, dim = query.shape
    pairs = len(encoded.bounds) - 1
    rows = query_heads * length * batch // pairs
    packed = query.reshape(pairs, rows, dim).contiguous()
    longest = max(end - begin for begin, end in zip(encoded.bounds, encoded.bounds[1:], strict=False))
    splits = max(1, triton.cdiv(longest, SPLIT))
    out = torch.empty(splits, pairs, rows, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(splits, pairs, rows, dtype=torch.float32, device=query.device)
    weighted = encoded.log_multiplicity is not None
    block_d = triton.next_power_of_2(max(16, dim))
    # Without tensor cores, or beside codes that are unpacked, 64 queries times 32 entries do not fit the registers.
    widest = 64 if encoded.format == "dense" and query.dtype != torch.float32 else 16
    block_m = min(widest, triton.next_power_of_2(max(16, rows)))
    attend_kernel[(pairs, splits, triton.cdiv(rows, block_m))](
        packed,
        codes,
        encoded.log_multiplicity if weighted else packed,
        encoded.offsets,
        out,
        lse,
        scale,
        0.0 if softcap is None else softcap,
        pairs,
        rows,
        SPLIT,
        LOAD=loader,
        CAPS=softcap is not None,
        WEIGHTED=weighted,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        num_warps=WARPS,
    )
    if splits > 1:
        merged, merged_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
        grid = (triton.cdiv(pairs * rows, 16),)
        merge_kernel[grid](out, lse, merged, merged_lse, pairs * rows, splits, DIM=dim, BLOCK_D=block_d, BLOCK_P=16)
    else:
        merged, merged_lse = out[0], lse[0]
    shape = (batch, query_heads, length)
    return merged.reshape(*shape, dim), merged_lse.reshape(shape)
