"""The specification: one head at a time, plain softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops.ragged_attention.logits import cap_logits
from kvframe.types import Entries


def ragged_attention(
    query: Tensor, entries: Entries, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend in fp32 (fp64 for an fp64 query), one (b, h) after the other; contract as `Kernel.attend`."""
    batch, query_heads, length, dim = query.shape
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads = (len(entries.bounds) - 1) // batch
    group = query_heads // heads
    out = torch.zeros(batch, query_heads, length, dim, dtype=precision, device=query.device)
    lse = torch.full((batch, query_heads, length), -torch.inf, dtype=precision, device=query.device)
    for pair, (begin, end) in enumerate(zip(entries.bounds, entries.bounds[1:], strict=False)):
        if begin == end:
            continue
        row, first = pair // heads, (pair % heads) * group
        keys, values = entries.keys[begin:end].to(precision), entries.values[begin:end].to(precision)
        logits = cap_logits(query[row, first : first + group].to(precision) @ keys.T * scale, softcap)  # [G, Q, n]
        if entries.log_multiplicity is not None:
            logits = logits + entries.log_multiplicity[begin:end].to(precision)
        lse[row, first : first + group] = logits.logsumexp(-1)
        out[row, first : first + group] = logits.softmax(-1) @ values
    return out, lse
