"""Column statistics of causal attention: how much a set of queries attends each key.

The attention matrix is never held whole: it is formed in blocks of queries, and a block sees only the keys up to its
last query. Padded keys get no attention, padded queries give none."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import attention_weights, cap_logits
from kvframe.types import LayerObservation

# Logits formed at a time. On a CPU a block should stay in the cache; elsewhere 64 MiB of fp32 keep the device busy.
CPU_BLOCK, DEVICE_BLOCK = 1 << 19, 1 << 24


def observed_queries(layer: LayerObservation, owner: str) -> Tensor:
    """Return the queries `[B, Hq, Tq, D]` of a layer. Raises StageError, naming the stage `owner`, if it has none."""
    if layer.queries is None:
        raise StageError(
            f"'{owner}' needs the queries of the prompt, but the observation has none; capture what it `needs`."
        )
    return layer.queries


def last_tokens(valid: Tensor, count: int, observed: int) -> Tensor:
    """Return int64 `[B, Q]`: the columns of the last `count` valid tokens of each row, in order, with -1 in front where
    a row has fewer. Only the last `observed` columns of `valid` bool `[B, T]` count; `Q = min(count, observed)`."""
    columns = torch.arange(valid.shape[1], device=valid.device)
    candidates = torch.where(valid, columns, -1)[:, valid.shape[1] - observed :]
    return candidates.topk(min(count, observed), dim=1).values.flip(1)


def attention_sums(
    layer: LayerObservation,
    queries: Tensor,
    columns: Tensor,
    valid: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return fp32 `[B, Hq, T]`: for each key the attention that it gets, summed over the chosen queries.

        sums[t] = sum over q of softmax over visible s of (scale * q.k_s) at s = t

    `queries [B, Hq, Tq, D]` are those of the last `Tq` tokens; `columns` int64 `[B, Q]` says which tokens' queries
    count (-1 = none); a query sees the valid keys (bool `[B, T]`) up to its own column. `softcap` caps the logits; the
    `sinks` `[Hq]` of the query heads take their share of the attention (None: there are none)."""
    batch, heads, tokens, dim = layer.keys.shape
    query_heads, observed = queries.shape[1], queries.shape[2]
    group = query_heads // heads
    keys = layer.keys.float().transpose(-1, -2)  # [B, H, D, T]
    places = torch.arange(tokens, device=valid.device)
    shares = None if sinks is None else sinks.view(heads, group, 1)
    sums = torch.zeros(batch, heads, group, tokens, device=valid.device)
    last = columns.amax(0).tolist()  # the last key that each block needs, in one transfer
    block_elements = CPU_BLOCK if valid.device.type == "cpu" else DEVICE_BLOCK
    step = max(1, block_elements // max(1, batch * query_heads * tokens))
    for begin in range(0, columns.shape[1], step):
        at = columns[:, begin : begin + step]  # [B, q]
        seen = max(last[begin : begin + step]) + 1
        if seen == 0:
            continue
        source = (at - (tokens - observed)).clamp_min(0)[:, None, :, None].expand(-1, query_heads, -1, dim)
        block = queries.gather(2, source).float().mul_(scale)  # [B, Hq, q, D]
        packed = block.reshape(batch, heads, group * at.shape[1], dim)
        logits = cap_logits(packed @ keys[..., :seen], softcap).view(batch, heads, group, at.shape[1], seen)
        hidden = ~valid[:, None, :seen] | (places[:seen] > at[..., None])  # [B, q, seen]
        # A finite bias: a padded query, which sees nothing, must not give NaN before it is weighted by 0.
        bias = torch.zeros(hidden.shape, device=valid.device).masked_fill_(hidden, torch.finfo(torch.float32).min)
        attention = attention_weights(logits.add_(bias[:, None, None]), shares)
        chosen = (at >= 0).float()[:, None, None, None]  # [B, 1, 1, 1, q]
        sums[..., :seen] += (chosen @ attention)[..., 0, :]
    return sums.view(batch, query_heads, tokens)
