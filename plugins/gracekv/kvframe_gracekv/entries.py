"""From a partition of the body to the plan of entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.types import LayerPlan, Observation, Plan
from kvframe_gracekv.rows import Row
from kvframe_gracekv.tables import Loss


@dataclass(frozen=True, eq=False)
class _RowPlan:
    row: Row
    owner: Tensor  # [L, H, N] entry of each body token, -1 dropped
    count: Tensor  # [L, H]
    weight: Tensor  # [L, H, N]
    multiplicity: list[Tensor]  # per layer, [entries]
    positions: list[Tensor]


class PlanBuilder:
    """Collects the partitions of the rows of an observation into one Plan."""

    def __init__(self, observation: Observation, scores: Tensor, loss: Loss) -> None:
        self.observation, self.scores, self.loss = observation, scores, loss
        self._rows: dict[int, _RowPlan] = {}

    def add(self, row: Row, begins: Tensor, dropped: Tensor) -> None:
        """Enter the partition of a row, bool `[L, H, N]` both (see `partition.Solution`)."""
        owner = torch.where(dropped, -1, begins.cumsum(-1, dtype=torch.int32) - 1)
        count = begins.sum(-1)
        weights: list[Tensor] = []
        multiplicities: list[Tensor] = []
        positions: list[Tensor] = []
        for layer in range(self.observation.model.layers):
            parts = self._layer(row, layer, owner[layer], count[layer])
            for kept, part in zip((weights, multiplicities, positions), parts, strict=True):
                kept.append(part)
        self._rows[row.index] = _RowPlan(row, owner, count, torch.stack(weights), multiplicities, positions)

    def _layer(self, row: Row, layer: int, owner: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(value weights [H, N], multiplicities [entries], positions [entries])` of one layer."""
        heads, tokens = owner.shape
        offsets = count.cumsum(0) - count
        total = int(count.sum())
        head, token = (owner >= 0).nonzero(as_tuple=True)
        entry = offsets[head] + owner[head, token]  # [K]

        def sums(rows: Tensor) -> Tensor:
            return torch.zeros(total, *rows.shape[1:], dtype=rows.dtype, device=rows.device).index_add_(0, entry, rows)

        size = torch.bincount(entry, minlength=total)
        score = self.scores[layer, row.index][:, row.body][head, token]
        mean = sums(score) / size.clamp_min(1)
        weight = score + self.loss.base * mean[entry]
        norm = sums(weight)[entry]
        blank = norm <= torch.finfo(torch.float32).tiny
        weight = torch.where(blank, 1.0 / size[entry], weight / torch.where(blank, 1.0, norm))
        at = self.observation.positions[row.index, row.body][token]
        first, last = (torch.zeros(total, dtype=at.dtype, device=at.device) for _ in range(2))
        first.scatter_reduce_(0, entry, at, "amin", include_self=False)
        last.scatter_reduce_(0, entry, at, "amax", include_self=False)
        out = torch.zeros(heads, tokens, device=owner.device)
        out[head, token] = weight
        return out, self._multiplicity(row, layer, head, token, entry, size), ((first + last) // 2).int()

    def _multiplicity(self, row: Row, layer: int, head: Tensor, token: Tensor, entry: Tensor, size: Tensor) -> Tensor:
        """clamp(n c^2, 1, n) with the coherence c of the keys before RoPE; 1 for a single token."""
        n = size.float()
        if not self.loss.coherent:
            return n
        several = (size > 1)[entry]
        head, token, entry = head[several], token[several], entry[several]
        keys = self.observation.layers[layer].keys[row.index][:, row.body][head, token]
        at = self.observation.positions[row.index, row.body][token]
        plain = self.observation.model.rope[layer].unrotate(keys, at)
        total = torch.zeros(len(n), plain.shape[1], device=n.device).index_add_(0, entry, plain)
        norms = torch.zeros_like(n).index_add_(0, entry, plain.norm(dim=-1))
        coherence = total.square().sum(-1) / norms.square().clamp_min(1e-30)
        return torch.where(size > 1, torch.minimum((n * coherence).clamp_min(1), n), 1.0)

    def build(self, notes: tuple[str, ...] = ()) -> Plan:
        """The plan of all rows; rows that were not entered keep nothing."""
        layers, batch, heads, tokens = self.observation.shape
        device = self.observation.valid.device
        plans = []
        for layer in range(layers):
            assignment = torch.full((batch, heads, tokens), -1, dtype=torch.int32, device=device)
            count = torch.zeros(batch, heads, dtype=torch.int64, device=device)
            weight = torch.zeros(batch, heads, tokens, device=device)
            multiplicity, positions = [], []
            for index in sorted(self._rows):
                plan = self._rows[index]
                assignment[index][:, plan.row.body] = plan.owner[layer]
                count[index] = plan.count[layer]
                weight[index][:, plan.row.body] = plan.weight[layer]
                multiplicity.append(plan.multiplicity[layer])
                positions.append(plan.positions[layer])
            if bool(count.sum() == (assignment >= 0).sum()):
                # Single tokens only: nothing to weigh, count or move.
                plans.append(LayerPlan(assignment, count))
            else:
                joined = torch.cat(multiplicity), torch.cat(positions)
                plans.append(LayerPlan(assignment, count, None, weight, *joined))
        return Plan(tuple(plans), notes)
