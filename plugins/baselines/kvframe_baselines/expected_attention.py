"""Attention that future queries are expected to give, from the statistics of the past ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.rope import Rope
from kvframe.stages import Scorer
from kvframe.types import LayerObservation, Needs, Observation, Segments
from kvframe_baselines.columns import observed_queries

# Numbers held at once while rotations are averaged: 16 MiB of fp32.
BLOCK_ELEMENTS = 1 << 22


def mean_rotation(rope: Rope, dim: int, start: Tensor, count: int) -> Tensor:
    """Return fp32 `[B, D, D]`: the mean matrix of a layer's RoPE over positions `start .. start + count - 1` (int64
    `[B]`), for head dimension `dim`; row `i` is the rotated unit vector `e_i`, so a vector `x` is turned as `x @
    result`."""
    batch = start.shape[0]
    unit = torch.eye(dim, device=start.device)[None, :, None]  # [1, D, 1, D]
    total = torch.zeros(batch, dim, dim, device=start.device)
    step = max(1, BLOCK_ELEMENTS // (batch * dim * dim))
    for begin in range(0, count, step):
        future = torch.arange(begin, min(begin + step, count), device=start.device)
        positions = start[:, None, None] + future  # [B, 1, F]
        total += rope.rotate(unit.expand(batch, dim, future.shape[0], dim), positions).sum(2)
    return total / count


class ExpectedAttention(Scorer):
    """Expected attention times the size of the value.

        q ~ N(mu, Sigma) before RoPE, R = mean RoPE matrix over the next `horizon` positions
        z[t] = scale * k_t . (R mu) + scale^2 / 2 * k_t^T (R Sigma R^T) k_t
        score[t] = (mean over the group of softmax over valid keys of z, at t, + eps) * ||v_t||_2

    mu and Sigma (divided by the number of queries) are taken per query head over the row's queries but the first
    `skip`; a row with no more than those uses them all. `scale` is the model's factor on q.k, 1 / sqrt(D) in the paper.
    Direction: much attention expected = keep. Source: Devoto et al. 2025."""

    paper: ClassVar[str] = "Devoto et al., 2025, arXiv 2510.00636"

    name: Literal["baselines.expected_attention"] = "baselines.expected_attention"
    horizon: int = Field(
        512, ge=1, description="Positions after the prompt over which the rotation is averaged, in tokens."
    )
    skip: int = Field(4, ge=0, description="First tokens of the prompt (sinks) left out of the query statistics.")
    eps: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Added to the attention (0 to 1): raises the weight of the value's norm.",
    )

    @property
    def needs(self) -> Needs:
        """The queries of all tokens."""
        return Needs(queries="all")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return fp32 `[L, B, H, T]`, in units of the value's norm."""
        last = observation.positions.masked_fill(~observation.valid, -1).amax(1)  # [B]
        model, scores, rope = observation.model, [], None
        for index in range(len(observation.layers)):
            if model.rope[index] is not rope:
                rope = model.rope[index]
                rotation = mean_rotation(rope, model.head_dim, last + 1, self.horizon)
            scores.append(self._score_layer(observation, index, rotation))
        return torch.stack(scores)

    def _score_layer(self, observation: Observation, index: int, rotation: Tensor) -> Tensor:
        """Return the scores `[B, H, T]` of one layer."""
        model, valid, layer = observation.model, observation.valid, observation.layers[index]
        mean, covariance = self._statistics(observation, layer, model.rope[index])
        # k . R x = (R^T k) . x: turning the keys once serves mean and covariance.
        turned = layer.keys.float() @ rotation.transpose(-1, -2)[:, None]  # [B, H, T, D]
        turned = turned[:, :, None]  # [B, H, 1, T, D]
        shape = (model.kv_heads, model.group)
        linear = (turned @ mean.unflatten(1, shape)[..., None])[..., 0]  # [B, H, G, T]
        square = ((turned @ covariance.unflatten(1, shape)) * turned).sum(-1)
        logits = model.scale * linear + model.scale**2 / 2 * square
        hidden = ~valid[:, None, None]
        attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
        return (attention.mean(2) + self.eps) * layer.values.float().norm(dim=-1)

    def _statistics(self, observation: Observation, layer: LayerObservation, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return mean `[B, Hq, D]` and covariance `[B, Hq, D, D]` of the queries before RoPE."""
        queries = observed_queries(layer, self.name)
        first = observation.valid.shape[1] - queries.shape[2]
        valid = observation.valid[:, first:]
        used = valid & (observation.valid.cumsum(1)[:, first:] > self.skip)
        used = torch.where(used.any(1, keepdim=True), used, valid)  # [B, Tq]
        share = used.float() / used.sum(1, keepdim=True).clamp_min(1)
        plain = rope.unrotate(queries, observation.positions[:, None, first:])  # [B, Hq, Tq, D]
        mean = share[:, None, None] @ plain  # [B, Hq, 1, D]
        centred = (plain - mean) * share.sqrt()[:, None, :, None]
        return mean[..., 0, :], centred.transpose(-1, -2) @ centred
