"""Eviction that folds what it evicts into what it keeps."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import LayerObservation, LayerPlan, Observation, Plan, Segments


class D2O(Allocator):
    """D2O: keeps the best tokens of each layer, merges those of the others that resemble one of them, drops the rest.

        layers: a layer whose scores are spread evenly gets a budget like exp(spread), as it has no few tokens that do
        merge: an evicted token i goes to the kept token j of highest s_ij = cos(k_i, k_j), if s_ij >= threshold of its
        head; weights are exp(s_ij) for those who come and e for the kept one, normalised, for keys and values alike

    The threshold of a head is the mean of its evicted tokens' highest s_ij (the paper's moving average at its first
    step) plus `similarity`. Keys are averaged as cached, an entry keeps the kept token's position, and nothing is
    counted: its multiplicity is 1. Source: Wan et al. 2024, layer and token level discrimination."""

    paper: ClassVar[str] = "Wan et al., 2024, arXiv 2406.13035"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    name: Literal["baselines.d2o"] = "baselines.d2o"
    similarity: float = Field(
        0.0, ge=-2, le=2, description="Added to the mean similarity of a head's evicted tokens; less merges more."
    )
    layer_spread: float = Field(
        0.3, ge=0, le=1, description="How far (0 to 1) layer budgets follow the spread of the scores; 0 = all alike."
    )

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of `budget // (L * H)` entries a head on average, equally many in the heads of a layer."""
        layers, batch, heads, _ = observation.shape
        counts = self.layer_counts(scores, observation.body, budget // heads)  # [L, B]
        kept = select_top(scores, counts[..., None].expand(layers, batch, heads), observation.body[None, :, None])
        return Plan(
            tuple(
                self._merge(seen, mask, observation)
                for seen, mask in zip(observation.layers, kept, strict=True)
            )
        )  # fmt: skip

    def layer_counts(self, scores: Tensor, body: Tensor, budget: Tensor) -> Tensor:
        """Return int64 `[L, B]`: tokens of each head of a layer; a row's counts add up to `budget` [B], or the body.

        The spread of a layer is the entropy of its scores relative to an even spread, mean over heads, 0 to 1."""
        layers = scores.shape[0]
        share = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        entropy = torch.special.entr(share).sum(-1).mean(-1)  # [L, B]
        even = body.sum(1).clamp_min(2).float().log()
        weight = (self.layer_spread * layers * (entropy / even).softmax(0) + 1 - self.layer_spread) / layers
        most = body.sum(1)
        counts = torch.minimum((weight * budget).floor().long(), most)
        for _ in range(layers):
            # What rounding and full layers leave goes to the others: evenly, then one each to the first.
            left, open_layers = budget - counts.sum(0), counts < most
            order = open_layers.cumsum(0)
            extra = left // open_layers.sum(0).clamp_min(1) + (order <= left % open_layers.sum(0).clamp_min(1))
            counts = torch.where(open_layers & (left > 0), torch.minimum(counts + extra, most), counts)
        return counts

    def _merge(self, seen: LayerObservation, kept: Tensor, observation: Observation) -> LayerPlan:
        """The plan of one layer that keeps `kept` bool `[B, H, T]`."""
        plan = LayerPlan.keep(kept)
        keys = torch.nn.functional.normalize(seen.keys.float(), dim=-1)
        assignment, weight = plan.assignment.clone(), torch.zeros(kept.shape, device=kept.device)
        evicted = observation.body[:, None] & ~kept
        positions = []
        for row in range(kept.shape[0]):
            for head in range(kept.shape[1]):
                here, gone = kept[row, head].nonzero()[:, 0], evicted[row, head].nonzero()[:, 0]
                positions.append(observation.positions[row, here])
                strength = torch.full((len(here),), torch.e, device=kept.device)
                if len(here) and len(gone):
                    best, which = (keys[row, head, gone] @ keys[row, head, here].T).max(-1)
                    comes = best >= best.mean() + self.similarity
                    gone, best, which = gone[comes], best[comes], which[comes]
                    total = strength.index_add(0, which, best.exp())
                    assignment[row, head, gone] = which.int()
                    weight[row, head, gone] = best.exp() / total[which]
                    strength = strength / total
                else:
                    strength = torch.ones_like(strength)
                weight[row, head, here] = strength
        where = torch.cat(positions).int()
        alone = torch.ones(len(where), device=kept.device)
        return LayerPlan(assignment, plan.n_entries, weight, weight, alone, where, align_rope=False)
