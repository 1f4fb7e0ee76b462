"""Whole chunks of text instead of single tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments


class Chunk(Allocator):
    """ChunkKV: keeps the best segments whole, the same tokens in all heads of a layer.

        token score = sum over heads of score;   segment score = mean of that over the segment's body tokens
        every head of a layer keeps floor(budget / (L * H)) tokens: best segment first, and of the last one, which does
        not fit whole, its best tokens

    What does not divide by layers and heads stays unspent. A larger budget keeps a superset. The segments are the
    segmenter's (`{name: chunks, size: 20}`; with `whole` this is top-k with heads in agreement). Source: Liu et al.
    2025, without its reuse of indices between layers."""

    paper: ClassVar[str] = "Liu et al., 2025, arXiv 2502.00299"
    ragged: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    name: Literal["baselines.chunk"] = "baselines.chunk"

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of `budget // (L * H)` tokens for each layer, shared by its heads."""
        layers, batch, heads, tokens = observation.shape
        body = observation.body
        token_score = scores.sum(2)  # [L, B, T]
        ids = (segments.ids - segments.ids[:, :1]).long().expand(layers, -1, -1)  # [L, B, T] in 0..T-1
        inside = body.float().expand(layers, -1, -1)
        size = torch.zeros_like(token_score).scatter_add_(-1, ids, inside)
        mean = torch.zeros_like(token_score).scatter_add_(-1, ids, token_score) / size.clamp_min(1)
        best_first = mean.argsort(dim=-1, descending=True, stable=True)  # [L, B, T] segments by score
        segment_place = places(best_first).gather(-1, ids)  # [L, B, T]
        # Sorting by token score first leaves the best tokens in front within each segment.
        by_score = token_score.argsort(dim=-1, descending=True, stable=True)
        by_segment = segment_place.gather(-1, by_score).argsort(dim=-1, stable=True)
        place = places(by_score.gather(-1, by_segment))
        kept = select_top(-place.float(), budget // (layers * heads), body)  # [L, B, T]
        return Plan(tuple(LayerPlan.keep(mask[:, None].expand(batch, heads, tokens)) for mask in kept))


def places(order: Tensor) -> Tensor:
    """Return the inverse of the permutations `order [..., T]`: the place of each item in its order."""
    ranks = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    return torch.empty_like(order).scatter_(-1, order, ranks)
