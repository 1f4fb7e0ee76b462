"""Selection by a stable sort, so that ties go to the earlier token and a row does not depend on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def select_top(scores: Tensor, count: Tensor, allowed: Tensor) -> Tensor:
    """Return bool `[..., T]`: the `count` highest `scores [..., T]` among the `allowed` tokens of each row.

    `count` int64 and `allowed` bool broadcast to `[...]` and `[..., T]`. Ties go to the earlier token. A row with fewer
    allowed tokens than `count` gets all of them."""
    masked = scores.masked_fill(~allowed, -torch.inf)
    order = masked.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    chosen = (ranks < count[..., None]).expand(order.shape)
    return torch.zeros_like(allowed.expand(scores.shape)).scatter(-1, order, chosen) & allowed
