"""Exact merge of attention over disjoint parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge `(out [..., D], lse [...])` of disjoint sets of entries into those of their union.

    Weighs each part by exp(lse - max lse). Where every part is empty (lse -inf) the result is out 0, lse -inf."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])  # [P, ...]
    top = lses.amax(0)
    weights = (lses - torch.where(top.isinf(), torch.zeros_like(top), top)).exp()  # [P, ...]
    total = weights.sum(0)
    shares = weights / total.clamp_min(torch.finfo(total.dtype).tiny)
    out = torch.zeros_like(parts[0][0])
    for share, (part, _) in zip(shares, parts, strict=True):
        out += share[..., None] * part
    return out, top + total.log()
