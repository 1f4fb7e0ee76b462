"""How sharply the residual stream turns at each token, over several depths and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-6


def directions(hidden: Tensor) -> Tensor:
    """Return fp32 `hidden [n, hidden]` with every row at length 1."""
    return F.normalize(hidden.float(), dim=-1, eps=_EPS)


def curvature(states: Sequence[Tensor], scales: Sequence[int], stability: float) -> Tensor:
    """Return fp32 `[n]`: how much the text turns after each token.

    For the directions h of each depth (`states`, each `[n, hidden]`) and each scale w:

        kappa_i = 1 - cos(h_i - mean of h over (i - w, i], mean of h over (i, i + w] - h_i),  0 closer than w to an end

    Returned is the mean over depths and scales minus `stability` times the standard deviation. Source: GraceKV,
    semantic slots."""
    found = [_at_scale(h, scale) for h in states for scale in scales]
    values = torch.stack(found)
    return values.mean(0) - stability * values.std(0, correction=0)


def _at_scale(h: Tensor, scale: int) -> Tensor:
    out = torch.zeros(len(h), device=h.device)
    if len(h) < 2 * scale + 1:
        return out
    means = F.avg_pool1d(h.T[None], scale, 1)[0].T  # [n - scale + 1, hidden], of h over [j, j + scale)
    i = slice(scale, len(h) - scale)
    before = h[i] - means[1 : len(h) - 2 * scale + 1]
    after = means[scale + 1 :] - h[i]
    norms = before.norm(dim=-1).clamp_min(_EPS) * after.norm(dim=-1).clamp_min(_EPS)
    out[i] = 1 - (before * after).sum(-1) / norms
    return out


def robust_z(values: Tensor) -> Tensor:
    """Return `values [n]` minus their median, in units of 1.4826 times their median absolute deviation."""
    median = values.double().quantile(0.5)
    deviation = (values - median).abs().double().quantile(0.5)
    return ((values - median) / (1.4826 * deviation + _EPS)).float()
