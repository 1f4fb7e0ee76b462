"""Soft matching as a batched matrix product: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the rows' squared norm: scores closer than this are ties. Several times what fp32 products round off.
TIE = 2.0**-17
# Scores held at once, 1 MiB of fp32: with their rows about what a core's cache holds.
BLOCK_ELEMENTS = 1 << 18


def soft_matching(
    rows: Tensor, sources: Tensor, targets: Tensor, metric: str, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Contract as `kvframe.ops.soft_matching`."""
    chunks, n_sources = sources.shape
    n_targets = targets.shape[1]
    likeness = rows.new_full((chunks, n_sources), -torch.inf)
    partner = torch.full_like(sources, -1)
    if 0 in (chunks, n_sources, n_targets):
        return likeness, partner
    # The first target has the highest rank; 0 is left for those that are no tie.
    rank = torch.arange(n_targets, 0, -1, dtype=rows.dtype, device=rows.device)
    step = max(1, BLOCK_ELEMENTS // (n_sources * n_targets))
    for begin in range(0, chunks, step):
        block = slice(begin, begin + step)
        source, target = sources[block], targets[block]
        at_source, at_target = source.clamp_min(0), target.clamp_min(0)
        a, b = gather(rows, at_source), gather(rows, at_target)
        if metric == "cosine":
            scores, slack = unit(a) @ unit(b).mT, rows.new_tensor(TIE)  # [p, a, b]
        else:
            a_square, b_square = a.square().sum(-1, keepdim=True), b.square().sum(-1)[:, None]
            scores, slack = 2 * (a @ b.mT) - a_square - b_square, TIE * a_square
        if metric == "ward" and counts is not None:
            n, m = counts[at_source][:, :, None], counts[at_target][:, None, :]
            scores, slack = scores * (n * m / (n + m)), slack * n
        scores += torch.zeros_like(target, dtype=rows.dtype).masked_fill_(target < 0, -torch.inf)[:, None]
        best = scores.amax(-1, keepdim=True)
        # As numbers, not as a mask: comparing, multiplying and the maximum are then all vector instructions on a CPU.
        tied = torch.ge(scores, best - slack, out=torch.empty_like(scores))
        first = tied.mul_(rank).amax(-1)
        place = (n_targets - first).long().clamp_max(n_targets - 1)
        matched = (source >= 0) & (target >= 0).any(-1, keepdim=True)
        top = 1.0 if metric == "cosine" else 0.0  # rounding may go beyond
        likeness[block] = torch.where(matched, best.squeeze(-1).clamp_max(top), -torch.inf)
        partner[block] = torch.where(matched, target.gather(1, place), -1)
    return likeness, partner


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`, several times as fast on a CPU."""
    return rows.index_select(0, index.flatten()).view(*index.shape, rows.shape[1])


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1; zeros stay zeros."""
    norm = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norm > 0, norm, 1)
