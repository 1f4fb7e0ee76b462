"""The weighted segment sum, written with torch's index_add."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_pool(rows: Tensor, weights: Tensor | None, segment: Tensor, n_segments: int) -> Tensor:
    """Return `[n_segments, D]`: for each segment the sum of `weights[k] * rows[k]` over its rows.

    `rows` fp32 or fp64 `[K, D]`, `weights` `[K]` (None = all 1), `segment` int64 `[K]` in 0..n_segments-1. The result
    has the dtype of `rows`; a segment without rows is 0."""
    out = torch.zeros(n_segments, rows.shape[1], dtype=rows.dtype, device=rows.device)
    weighted = rows if weights is None else rows * weights.to(rows.dtype)[:, None]
    return out.index_add_(0, segment, weighted)
