"""Exact merge of attention over disjoint parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]


def merge_attention(parts: Sequence[Attended]) -> Attended:
    """Merge `(out [..., D], lse [...])` of disjoint sets of entries into those of their union.

    Where every part is empty (lse -inf) the result is out 0, lse -inf."""
    return reduce(_merge_two, parts)


def merge_sinks(attended: Attended, sinks: Tensor | None) -> Attended:
    """Add to attention `(out [B, Hq, Q, D], lse [B, Hq, Q])` what is one more part without values: a term of the sum of
    exponentials with the logits `sinks [Hq]`; None = there is none."""
    if sinks is None:
        return attended
    out, lse = attended
    return merge_attention([attended, (torch.zeros_like(out), sinks.to(lse.dtype)[:, None].expand_as(lse))])


def _merge_two(first: Attended, second: Attended) -> Attended:
    # The second part's share exp(b) / (exp(a) + exp(b)) is the logistic function of b - a: one kernel, no overflow.
    share = torch.sigmoid(second[1] - first[1]).nan_to_num_(0.0)  # -inf minus -inf: both empty
    return torch.lerp(first[0], second[0], share[..., None]), torch.logaddexp(first[1], second[1])
