"""The most confident edges of each group."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 2.0**17


def highest(values: Tensor, group: Tensor, quota: Tensor) -> Tensor:
    """Return bool `[K]`: the `quota` int64 `[G]` highest `values [K]` of each `group` int64 `[K]`, or all it has.

    Values are compared to 17 bits: what differs by rounding only is a tie, and ties go to the earlier item. No group
    depends on another one."""
    mantissa, exponent = torch.frexp(values)
    values = torch.ldexp((mantissa * BITS).round() / BITS, exponent)
    order = values.argsort(descending=True, stable=True)
    if len(quota) > 1:
        order = order[group[order].argsort(stable=True)]
    size = torch.bincount(group, minlength=len(quota))
    first = size.cumsum(0) - size
    ordered = group[order]
    rank = torch.arange(len(order), device=order.device) - first[ordered]
    return torch.empty_like(group, dtype=torch.bool).scatter_(0, order, rank < quota[ordered])
