"""Clustering entries again, while an answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.rope import Rope
from kvframe.types import Entries, ModelInfo, Regrouping
from kvframe_centroidkv.partition import places
from kvframe_centroidkv.passes import Work, cluster
from kvframe_centroidkv.plans import by_position
from kvframe_centroidkv.targets import share_out

if TYPE_CHECKING:
    from kvframe_centroidkv.allocator import SoftMatching

# Entries in a chunk. The segmenter's chunks are of tokens, which are long gone.
CHUNK = 256


def cluster_again(method: SoftMatching, body: Sequence[Entries], model: ModelInfo, budget: Tensor) -> list[Regrouping]:
    """Cluster the entries of all layers as tokens are clustered, each with its multiplicity, till `budget` int64 `[B]`
    are left over all layers and heads. None of them is safeguarded: there are no scores any more."""
    layers, heads = len(body), model.kv_heads
    counts = torch.stack([entries.offsets.diff() for entries in body])  # [L, B*H]
    batch = counts.shape[1] // heads
    held = counts.view(layers, batch, heads).sum((0, 2))
    targets = share_out(torch.minimum(budget, held), layers, heads, method.share, 0.0)
    pieces, device = counts.flatten(), counts.device
    unit = torch.arange(len(pieces), device=device).repeat_interleave(pieces)  # [M]
    alive = targets.alive.flatten()[unit]
    keys = torch.cat([_keys(method, entries, model.rope[layer]) for layer, entries in enumerate(body)])[alive]
    mass = torch.cat([_mass(entries) for entries in body])[alive]
    position = torch.cat([_positions(entries) for entries in body])[alive].double()
    here = unit[alive]
    units = torch.arange(len(pieces), device=device)
    work = Work(
        sums=keys * mass.to(keys.dtype)[:, None],
        counts=mass.to(keys.dtype),
        unit=here,
        segment=places(here)[1] // CHUNK,
        chunk=torch.full_like(pieces, CHUNK),
        stream=units // (batch * heads) * heads + units % heads,
        group=targets.group.flatten(),
        target=targets.total,
    )
    clusters = cluster(work, method)
    count = len(clusters.unit)

    def add(rows: Tensor) -> Tensor:
        return rows.new_zeros(count).index_add_(0, clusters.owner, rows)

    _, number = by_position(clusters.unit, add(mass * position) / add(mass))
    joins = torch.full_like(unit, -1)
    joins[alive] = number[clusters.owner]
    n_entries = torch.bincount(clusters.unit, minlength=len(pieces)).view(layers, batch, heads)
    rows = joins.split([len(entries.keys) for entries in body])
    return [Regrouping(rows[i], n_entries[i], method.rope == "pre") for i in range(layers)]


def _keys(method: SoftMatching, entries: Entries, rope: Rope) -> Tensor:
    """What is compared: the keys before RoPE, or as held."""
    if method.rope == "pre":
        return rope.unrotate(entries.keys, _positions(entries).long())
    return entries.keys if entries.keys.dtype == torch.float64 else entries.keys.float()


def _positions(entries: Entries) -> Tensor:
    if entries.positions is None:
        raise RuntimeError("core gives positions to what is grouped again")
    return entries.positions


def _mass(entries: Entries) -> Tensor:
    """Tokens that each entry stands for, fp64 `[N]`."""
    if entries.log_multiplicity is None:
        return torch.ones(len(entries.keys), dtype=torch.float64, device=entries.keys.device)
    return entries.log_multiplicity.double().exp()
