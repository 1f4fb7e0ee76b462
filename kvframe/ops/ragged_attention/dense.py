"""Attention over dense keys that also returns the log-sum-exp, which torch's public function does not."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops.ragged_attention.logits import cap_logits

BLOCK_ELEMENTS = 1 << 24  # scores held at once: 64 MiB of fp32


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out [B, Hq, Q, D], lse [B, Hq, Q])` in fp32 for `query [B, Hq, Q, D]` on `keys, values [B, H, n, D]`.

    `softcap` caps the logits (None: there is no cap); `bias` broadcasts to `[B, H, Q, n]` and is added to them after
    that (fp32; -inf masks); None = attend everything. A query that may see nothing gives out 0 and lse -inf. On a CPU
    torch's fused kernel is used where it applies, which is not where logits are capped; elsewhere scores are formed in
    blocks of queries, at most 64 MiB at a time."""
    batch, query_heads, length, dim = query.shape
    heads, n = keys.shape[1], keys.shape[2]
    if n == 0:
        out = query.new_zeros(query.shape, dtype=torch.float32)
        return out, out.new_full(out.shape[:-1], -torch.inf)
    group = query_heads // heads
    shape = (batch, query_heads, length)
    if query.device.type == "cpu" and query.dtype == keys.dtype and softcap is None:
        # The fused kernel takes channels for adjacent and reads something else where they are not.
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        if bias is None or length == 1:
            out, lse = _fused(query.reshape(batch, heads, group * length, dim), keys, values, scale, bias)
        else:
            # One call for each query head of a group, since all of them share one bias.
            heads_of = query.reshape(batch, heads, group, length, dim).unbind(2)
            found = [_fused(one, keys, values, scale, bias) for one in heads_of]
            out, lse = (torch.stack(pieces, 2) for pieces in zip(*found, strict=True))
        return out.reshape(*shape, dim), lse.reshape(shape)
    grouped = query.reshape(batch, heads, group, length, dim)
    keys32, values32 = keys[:, :, None].float(), values[:, :, None].float()  # a product in bf16 would round each logit
    step = max(1, BLOCK_ELEMENTS // max(1, batch * query_heads * n))
    outs, lses = [], []
    for begin in range(0, length, step):
        block = grouped[:, :, :, begin : begin + step]  # [B, H, G, q, D]
        logits = cap_logits(block.float() @ keys32.transpose(-1, -2) * scale, softcap)  # [B, H, G, q, n]
        if bias is not None:
            part = bias if bias.shape[-2] == 1 else bias[..., begin : begin + step, :]
            logits = logits + part.float()[:, :, None]
        lse = logits.logsumexp(-1)
        weights = (logits - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]).exp()
        outs.append(weights @ values32)
        lses.append(lse)
    return torch.cat(outs, 3).reshape(*shape, dim), torch.cat(lses, 3).reshape(shape)


def _fused(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """torch's fused kernel for a CPU, `[B, H, q, D]` on `[B, H, n, D]`; `bias` broadcasts to `[B, H, q, n]`."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    # fp32 also for bf16 keys: a bf16 logarithm would be off by a percent
    mask = None if bias is None else bias.float()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    out = out.float()
    if mask is not None:
        blind = (mask == -torch.inf).all(-1)  # what the kernel returns for those is not defined
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    return out, lse
