"""Soft matching in one kernel: gathers the rows of a chunk and keeps the best partner as it goes, so that no score and
no gathered row is ever written out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.soft_matching.reference import EQUAL

METRICS = {"cosine": 0, "distance": 1, "ward": 2}
# Sources and targets that one program compares at once.
BLOCK = 32


@triton.jit
def match_kernel(
    rows,  # fp32 [M, D]
    counts,  # fp32 [M]; read for ward only
    sources,  # int64 [P, a]
    targets,  # int64 [P, b]
    likeness,  # fp32 [P, a], out
    partner,  # int64 [P, a], out
    n_sources,
    n_targets,
    dim,
    equal,
    METRIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program for one chunk and BLOCK of its sources."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = place < n_sources
    source = tl.load(sources + chunk * n_sources + place, mask=inside, other=-1)  # [BLOCK]
    a = tl.load(
        rows + source[:, None] * dim + columns[None, :],
        mask=(source >= 0)[:, None] & (columns < dim)[None, :],
        other=0.0,
    )
    a_square = tl.sum(a * a, axis=1)
    if METRIC == 0:
        norm = tl.sqrt(a_square)
        a = a / tl.where(norm > 0, norm, 1.0)[:, None]
    if METRIC == 2:
        n = tl.load(counts + source, mask=source >= 0, other=1.0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.full([BLOCK], -1, tl.int64)
    for begin in range(0, n_targets, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        target = tl.load(targets + chunk * n_targets + other, mask=other < n_targets, other=-1)
        b = tl.load(
            rows + target[:, None] * dim + columns[None, :],
            mask=(target >= 0)[:, None] & (columns < dim)[None, :],
            other=0.0,
        )
        b_square = tl.sum(b * b, axis=1)
        if METRIC == 0:
            b_norm = tl.sqrt(b_square)
            b = b / tl.where(b_norm > 0, b_norm, 1.0)[:, None]
        # Products in full fp32: tf32 would not tell equal rows from similar ones.
        score = tl.dot(a, tl.trans(b), input_precision="ieee")  # [BLOCK, BLOCK]
        if METRIC == 0:
            score = tl.where(score > 1 - equal, 1.0, score)
        else:
            size = a_square[:, None] + b_square[None, :]
            score = size - 2 * score
            score = -tl.where(score < equal * size, 0.0, score)
        if METRIC == 2:
            m = tl.load(counts + target, mask=target >= 0, other=1.0)
            score = score * (n[:, None] * m[None, :] / (n[:, None] + m[None, :]))
        score = tl.where((target >= 0)[None, :], score, float("-inf"))
        top, at = tl.max(score, axis=1, return_indices=True)
        candidate = tl.sum(tl.where(tl.arange(0, BLOCK)[None, :] == at[:, None], target[None, :], 0), axis=1)
        better = top > best  # the earlier of two equal targets stays
        best = tl.where(better, top, best)
        found = tl.where(better, candidate, found)
    matched = (source >= 0) & (found >= 0)
    out = chunk * n_sources + place
    tl.store(likeness + out, tl.where(matched, best, float("-inf")), mask=inside)
    tl.store(partner + out, tl.where(matched, found, -1), mask=inside)


def soft_matching(
    rows: Tensor, sources: Tensor, targets: Tensor, metric: str, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Contract as `kvframe.ops.soft_matching`, for fp32 rows on a GPU (on a CPU under TRITON_INTERPRET=1)."""
    if rows.dtype != torch.float32:
        raise InputError(f"soft_matching's triton kernel takes fp32 rows, not {rows.dtype}; convert them.")
    if not rows.is_cuda and not triton.knobs.runtime.interpret:
        raise InputError("soft_matching's triton kernel runs on a GPU, but the rows are on a CPU; use impl='auto'.")
    chunks, n_sources = sources.shape
    likeness = torch.full(sources.shape, -torch.inf, device=rows.device)
    partner = torch.full_like(sources, -1)
    if 0 in (chunks, n_sources, targets.shape[1]):
        return likeness, partner
    rows = rows.contiguous()
    weights = rows if counts is None else counts.float().contiguous()
    dim = rows.shape[1]
    match_kernel[(chunks, triton.cdiv(n_sources, BLOCK))](
        rows,
        weights,
        sources.contiguous(),
        targets.contiguous(),
        likeness,
        partner,
        n_sources,
        targets.shape[1],
        dim,
        EQUAL,
        METRIC=METRICS[metric],
        BLOCK=BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
    )
    return likeness, partner
