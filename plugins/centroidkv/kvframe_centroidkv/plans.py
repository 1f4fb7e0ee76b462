"""From clusters to plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.types import LayerPlan, Observation
from kvframe_centroidkv.partition import places
from kvframe_centroidkv.passes import Clusters

if TYPE_CHECKING:
    from kvframe_centroidkv.allocator import SoftMatching


def plan_layers(
    method: SoftMatching, observation: Observation, clusters: Clusters, place: Tensor, single: Tensor, keys: Tensor
) -> list[LayerPlan]:
    """Return one plan for each of the `l` layers of `single` bool `[l, B, H, T]`, the tokens kept as they are.

    `place` int64 `[M]` are the clustered tokens as indices into the flattened `single`, `keys [M, D]` theirs. The
    entries of a (b, h) are numbered by their mean position."""
    layers, batch, heads, tokens = single.shape
    kept = single.flatten().nonzero().squeeze(1)
    tokens_at = torch.cat([place, kept])  # [K] all assigned tokens
    entry = torch.cat([clusters.owner, len(clusters.unit) + torch.arange(len(kept), device=kept.device)])  # [K]
    unit = torch.cat([clusters.unit, kept // tokens])  # [N]
    row, column = tokens_at // (tokens * heads) % batch, tokens_at % tokens
    size = torch.bincount(entry, minlength=len(unit))
    position = observation.positions[row, column].double()
    mean = torch.zeros(len(unit), dtype=torch.float64, device=entry.device).index_add_(0, entry, position) / size
    order, number = by_position(unit, mean)  # [N]
    assignment = torch.full(single.shape, -1, dtype=torch.int32, device=single.device)
    assignment.view(-1)[tokens_at] = number[entry].int()
    n_entries = torch.bincount(unit, minlength=layers * batch * heads).view(layers, batch, heads)
    weight = multiplicities(method, clusters, keys, size)
    per_layer: list[Tensor | None] = [None] * layers
    if weight is not None:
        per_layer = list(weight[order].split(n_entries.sum((1, 2)).tolist()))
    return [
        LayerPlan(assignment[i], n_entries[i], multiplicity=per_layer[i], align_rope=method.rope == "pre")
        for i in range(layers)
    ]


def by_position(unit: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """`(order, number)` int64 `[N]` of entries by `unit` and then by `position`: who comes at each place, and each
    entry's number within its unit."""
    order = position.argsort(stable=True)
    order = order[unit[order].argsort(stable=True)]
    return order, torch.empty_like(order).scatter_(0, order, places(unit[order])[1])


def multiplicities(method: SoftMatching, clusters: Clusters, keys: Tensor, size: Tensor) -> Tensor | None:
    """fp32 `[N]` for entries of `size` int64 `[N]` tokens, or None for the size itself."""
    if method.multiplicity == "count":
        return None
    ones = torch.ones_like(size, dtype=torch.float32)
    if method.multiplicity == "none":
        return ones
    norm = keys.norm(dim=-1, keepdim=True)
    directions = keys / torch.where(norm > 0, norm, 1)
    count = len(clusters.unit)
    joint = keys.new_zeros(count, keys.shape[1]).index_add_(0, clusters.owner, directions)
    ones[:count] = (joint.square().sum(-1) / size[:count]).float()
    return ones.clamp_min(1).minimum(size.float())
