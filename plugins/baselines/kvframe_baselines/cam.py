"""Eviction that leaves a share of the evicted value behind."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments


class CaM(Allocator):
    """CaM with one target: keeps the best tokens of each head and adds to each of them, j, a share of the values of the
    evicted tokens i that stand between it and the kept token before it:

        v_j + sum over i of p_i v_i,   p_i = min(1, score_i / score_j)

    The published method spreads an evicted value over the next 16 to 32 kept tokens and draws whether to do so with
    probability p, score by score as tokens come; here it goes to the next one alone (a plan gives each token one
    entry), by its expectation, once after the prefill. A value of an entry is a mean, so the sum is held as the mean
    and a multiplicity of 1 + sum of p_i: the output's numerator is CaM's, its softmax counts the added share too. Keys
    and positions are those of the kept tokens. Evicted tokens behind the last kept one are dropped. Source: Zhang et
    al. 2024, cache merging."""

    paper: ClassVar[str] = "Zhang et al., 2024, ICML (CaM), with one target"
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    name: Literal["baselines.cam"] = "baselines.cam"

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of `budget // (L * H)` entries for each (layer, head)."""
        layers, _, heads, _ = observation.shape
        count = budget // (layers * heads)  # [B]
        kept = select_top(scores, count[None, :, None], observation.body[None, :, None])
        body = observation.body[:, None]
        return Plan(tuple(_merged(mask, body, score, observation) for mask, score in zip(kept, scores, strict=True)))


def _merged(kept: Tensor, body: Tensor, scores: Tensor, observation: Observation) -> LayerPlan:
    """The plan of one layer; `kept` bool and `scores` `[B, H, T]`."""
    plan, tokens = LayerPlan.keep(kept), kept.shape[-1]
    column = torch.arange(tokens, device=kept.device)
    # The kept column at or after each one; `tokens` where there is none.
    after = torch.where(kept, column, tokens).flip(-1).cummin(-1).values.flip(-1)  # [B, H, T]
    joins = body & (after < tokens)
    target = after.clamp_max(tokens - 1)
    assignment = torch.where(joins, plan.assignment.gather(-1, target), -1)
    least = torch.finfo(scores.dtype).tiny
    share = torch.where(joins, (scores / scores.gather(-1, target).clamp_min(least)).clamp_max(1), 0)
    share = torch.where(kept, 1.0, share)
    total = torch.zeros_like(share).scatter_add_(-1, target, share)  # at kept columns
    value_weight = torch.where(joins, share / total.gather(-1, target).clamp_min(1), 0)
    positions = observation.positions[:, None].expand_as(kept)[kept].int()
    return LayerPlan(assignment, plan.n_entries, kept.float(), value_weight, total[kept], positions, align_rope=False)
