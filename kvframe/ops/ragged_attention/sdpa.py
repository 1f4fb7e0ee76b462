"""Ragged attention through fused dense attention: one call if all heads have equally many entries, else one a head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops.ragged_attention.dense import dense_attention
from kvframe.types import Entries


def ragged_attention(
    query: Tensor, entries: Entries, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Contract as `Kernel.attend`. Nothing is padded and nothing is copied: dense attention runs on views."""
    batch, query_heads, length, dim = query.shape
    heads = (len(entries.bounds) - 1) // batch
    log_multiplicity = entries.log_multiplicity
    if (n := entries.uniform) is not None:
        shape = (batch, heads, n, dim)
        bias = None if log_multiplicity is None else log_multiplicity.view(batch, heads, 1, n)
        return dense_attention(query, entries.keys.view(shape), entries.values.view(shape), scale, bias, softcap)
    group = query_heads // heads
    grouped = query.reshape(batch * heads, 1, group, length, dim)
    outs, lses = [], []
    for pair, (begin, end) in enumerate(zip(entries.bounds, entries.bounds[1:], strict=False)):
        bias = None if log_multiplicity is None else log_multiplicity[None, None, None, begin:end]
        keys, values = entries.keys[None, None, begin:end], entries.values[None, None, begin:end]
        out, lse = dense_attention(grouped[pair], keys, values, scale, bias, softcap)
        outs.append(out)
        lses.append(lse)
    rows = (batch, query_heads, length)
    return torch.cat(outs).reshape(*rows, dim), torch.cat(lses).reshape(rows)
