"""The singleton floor: tokens that each head may keep exactly before the auction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FloorRule:
    """See the fields of `gracekv.budget_flow`."""

    share: float
    pool_width: int
    consensus: float
    threshold: float
    mass: float


def floor_candidates(value: Tensor, budget: int, rule: FloorRule) -> list[tuple[int, int]]:
    """Return (unit, token) in the order in which they are to be realised: the best of every head, then the second best.

    For token values `value [U, N]`, each unit summing to 1:

        f[u, t] = max over |s - t| <= pool_width // 2 of (1 - consensus) value[u, s] + consensus mean_u value[u, s]

    A unit's candidates are its tokens by falling f, as long as f >= threshold / N and until their values would exceed
    `mass`. If there are more than `share * budget`, every unit's number shrinks in proportion, to 1 at least. Source:
    GraceKV, budget flow, stage I."""
    tokens = value.shape[1]
    cap = int(rule.share * budget)
    if cap == 0:
        return []
    blended = (1 - rule.consensus) * value + rule.consensus * value.mean(0)
    score = F.max_pool1d(blended[None], rule.pool_width, 1, rule.pool_width // 2)[0]
    ranked, order = score.sort(dim=-1, descending=True, stable=True)
    within = value.gather(-1, order).cumsum(-1) <= rule.mass
    # "Stop before": nothing behind the first token that does not fit.
    good = ((ranked >= rule.threshold / tokens) & within).cumprod(-1).bool()
    count = good.sum(-1)
    total = int(count.sum())
    if total > cap:
        count = torch.where(count > 0, (count * cap // total).clamp_min(1), 0)
    chosen = torch.arange(tokens, device=value.device) < count[:, None]
    rank, unit = chosen.T.nonzero(as_tuple=True)  # sorted by rank, then unit
    return list(zip(unit.tolist(), order[unit, rank].tolist(), strict=True))
