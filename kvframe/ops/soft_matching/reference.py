"""Soft matching as a batched matrix product: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to a row's squared norm: what is closer than this to being equal differs by fp32 rounding only.
EQUAL = 2.0**-20
# Scores held at once, 4 MiB of fp32: about what a core's cache holds.
BLOCK_ELEMENTS = 1 << 20


def soft_matching(
    rows: Tensor, sources: Tensor, targets: Tensor, metric: str, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Contract as `kvframe.ops.soft_matching`."""
    chunks, n_sources = sources.shape
    likeness = rows.new_full((chunks, n_sources), -torch.inf)
    partner = torch.full_like(sources, -1)
    if 0 in (chunks, n_sources, targets.shape[1]):
        return likeness, partner
    if metric == "cosine":
        norm = rows.norm(dim=-1, keepdim=True)
        rows = rows / torch.where(norm > 0, norm, 1)
    square = rows.square().sum(-1) if metric != "cosine" else None
    step = max(1, BLOCK_ELEMENTS // (n_sources * targets.shape[1]))
    for begin in range(0, chunks, step):
        block = slice(begin, begin + step)
        source, target = sources[block], targets[block]
        at_source, at_target = source.clamp_min(0), target.clamp_min(0)
        scores = rows[at_source] @ rows[at_target].mT  # [p, a, b]
        if square is None:
            scores = torch.where(scores > 1 - EQUAL, 1.0, scores)
        else:
            size = square[at_source][:, :, None] + square[at_target][:, None, :]
            scores = size - 2 * scores
            scores = -torch.where(scores < EQUAL * size, 0.0, scores)
        if metric == "ward" and counts is not None:
            n, m = counts[at_source][:, :, None], counts[at_target][:, None, :]
            scores = scores * (n * m / (n + m))
        scores = scores.masked_fill((target < 0)[:, None, :], -torch.inf)
        best, place = scores.max(-1)
        matched = (source >= 0) & (target >= 0).any(-1, keepdim=True)
        likeness[block] = torch.where(matched, best, -torch.inf)
        partner[block] = torch.where(matched, target.gather(1, place), -1)
    return likeness, partner
