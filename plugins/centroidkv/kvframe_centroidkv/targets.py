"""How many entries each group of heads may have, and how many of them are singletons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Share = Literal["head", "layer", "global"]


@dataclass(frozen=True, eq=False)
class Targets:
    """Attributes, for `L` layers, `B` rows, `H` heads and `G` groups:

    group: int64 `[L, B, H]`, the group of each unit; groups of earlier layers come first, and of a layer earlier rows.
    total: int64 `[G]`, entries that a group may have.
    singles: int64 `[L, B, H]`, tokens of a unit that are kept as they are.
    alive: bool `[L, B, H]`, units that keep anything: a group of fewer entries than units empties its last ones.
    """

    group: Tensor
    total: Tensor
    singles: Tensor
    alive: Tensor


def share_out(budget: Tensor, layers: int, heads: int, share: Share, safeguard: float) -> Targets:
    """Share out `budget` int64 `[B]`: what does not divide goes to the first layers and heads, one entry each.

    A share of `safeguard` of a group's entries, the same number in each of its units, are singletons; at least one
    entry a unit is left for the other tokens."""
    batch, device = len(budget), budget.device
    parts = {"head": (layers, heads), "layer": (layers, 1), "global": (1, 1)}[share]
    count = parts[0] * parts[1]
    rounding = count - 1 - torch.arange(count, device=device)
    total = ((budget + rounding[:, None]) // count).view(*parts, batch).transpose(1, 2)  # [l, B, h]
    group = torch.arange(total.numel(), device=device).view(total.shape).expand(layers, batch, heads)
    order = torch.arange(layers * heads, device=device).view(layers, 1, heads)
    units = layers * heads // count
    within = {"head": torch.zeros_like(order), "layer": order % heads, "global": order}[share]
    alive = within < total
    wanted = torch.minimum((safeguard * total.double() / units).floor().long(), (total - units) // units)
    singles = wanted.clamp_min(0).expand(layers, batch, heads)
    return Targets(group, total.flatten(), singles, alive.expand(layers, batch, heads))
