"""Soft matching in one kernel: gathers the rows of a chunk and keeps the best partner as it goes, so that no score and
no gathered row is ever written out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.launch import beside_its_tensors
from kvframe.ops.soft_matching.reference import TIE

METRICS = {"cosine": 0, "distance": 1, "ward": 2}
# Sources and targets that one program compares at once.
BLOCK = 32


@triton.jit
def load_rows(rows, index, dim, METRIC: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the rows fp32 `[BLOCK, BLOCK_D]` at `index` int64 `[BLOCK]` (-1 = zeros), of length 1 for the cosine, and
    their squared norms."""
    columns = tl.arange(0, BLOCK_D)
    mask = (index >= 0)[:, None] & (columns < dim)[None, :]
    block = tl.load(rows + index[:, None] * dim + columns[None, :], mask=mask, other=0.0)
    square = tl.sum(block * block, axis=1)
    if METRIC == 0:
        norm = tl.sqrt(square)
        block = block / tl.where(norm > 0, norm, 1.0)[:, None]
        square = tl.where(norm > 0, 1.0, 0.0)
    return block, square


@triton.jit
def score_tile(a, a_square, n, rows, counts, target, dim, METRIC: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the likeness `[BLOCK, BLOCK]` of loaded sources and the targets at `target` int64 `[BLOCK]`."""
    b, b_square = load_rows(rows, target, dim, METRIC, BLOCK_D)
    # Products in full fp32: tf32 would not tell equal rows from similar ones.
    score = tl.dot(a, tl.trans(b), input_precision="ieee")
    if METRIC != 0:
        score = 2 * score - a_square[:, None] - b_square[None, :]
    if METRIC == 2:
        m = tl.load(counts + target, mask=target >= 0, other=1.0)
        score = score * (n[:, None] * m[None, :] / (n[:, None] + m[None, :]))
    return tl.where((target >= 0)[None, :], score, float("-inf"))


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
    tie,
    METRIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program for one chunk and BLOCK of its sources: once over the targets for the best likeness, once more for
    the first target that has it, up to ties."""
    chunk = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    place = tl.program_id(1) * BLOCK + lanes
    inside = place < n_sources
    source = tl.load(sources + chunk * n_sources + place, mask=inside, other=-1)  # [BLOCK]
    a, slack = load_rows(rows, source, dim, METRIC, BLOCK_D)
    a_square = slack
    slack = slack * tie
    n = a_square
    if METRIC == 2:
        n = tl.load(counts + source, mask=source >= 0, other=1.0)
        slack = slack * n
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, n_targets, BLOCK):
        other = begin + lanes
        target = tl.load(targets + chunk * n_targets + other, mask=other < n_targets, other=-1)
        score = score_tile(a, a_square, n, rows, counts, target, dim, METRIC, BLOCK_D)
        best = tl.maximum(best, tl.max(score, axis=1))
    first = tl.full([BLOCK], 2147483647, tl.int32)
    for begin in range(0, n_targets, BLOCK):
        other = begin + lanes
        target = tl.load(targets + chunk * n_targets + other, mask=other < n_targets, other=-1)
        score = score_tile(a, a_square, n, rows, counts, target, dim, METRIC, BLOCK_D)
        tied = (score >= (best - slack)[:, None]) & (target >= 0)[None, :]
        first = tl.minimum(first, tl.min(tl.where(tied, other[None, :], 2147483647), axis=1))
    matched = (source >= 0) & (first < n_targets)
    found = tl.load(targets + chunk * n_targets + first, mask=matched, other=-1)
    out = chunk * n_sources + place
    ceiling = 1.0 if METRIC == 0 else 0.0
    tl.store(likeness + out, tl.where(matched, tl.minimum(best, ceiling), float("-inf")), mask=inside)
    tl.store(partner + out, found, mask=inside)


@beside_its_tensors
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
        TIE,
        METRIC=METRICS[metric],
        BLOCK=BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
    )
    return likeness, partner
