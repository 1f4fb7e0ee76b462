"""The most confident edges of each group."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 2.0**17


def highest(values: Tensor, group: Tensor, quota: Tensor) -> Tensor:
    """Return bool `[K]`: the `quota` int64 `[G]` highest `values [K]` of each `group` int64 `[K]`, or all it has.

    Values are compared to 17 bits: what differs by rounding only is a tie, and ties go to the earlier item. No group
    depends on another one."""
    size = torch.bincount(group, minlength=len(quota))
    if bool((quota >= size).all()):
        return torch.ones_like(group, dtype=torch.bool)
    mantissa, exponent = torch.frexp(values)
    values = torch.ldexp((mantissa * BITS).round() / BITS, exponent)
    if len(quota) == 1:
        return highest_of_all(values, int(quota[0]))
    order = values.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    first = size.cumsum(0) - size
    ordered = group[order]
    rank = torch.arange(len(order), device=order.device) - first[ordered]
    return torch.empty_like(group, dtype=torch.bool).scatter_(0, order, rank < quota[ordered])


def highest_of_all(values: Tensor, quota: int) -> Tensor:
    """As `highest` for one group of more than `quota` values, without sorting them."""
    if quota <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    last = values.kthvalue(len(values) - quota + 1).values
    above, tied = values > last, values == last
    return above | tied & (tied.cumsum(0) <= quota - above.sum())
