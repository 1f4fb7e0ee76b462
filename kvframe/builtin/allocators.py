"""Allocators without a method of their own: keep everything, or the same number of tokens in every head."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments


class KeepAll(Allocator):
    """Keeps every token as an entry of its own and ignores the budget: for full attention, or an encoder alone."""

    name: Literal["keep_all"] = "keep_all"
    ragged: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the identity plan of the body."""
        _, batch, heads, tokens = observation.shape
        kept = observation.body[:, None].expand(batch, heads, tokens)
        return Plan(tuple(LayerPlan.keep(kept) for _ in observation.layers))


class TopK(Allocator):
    """Keeps the tokens of highest score, equally many in every layer and head. What is left over when the budget does
    not divide by layers and heads stays unspent."""

    name: Literal["top_k"] = "top_k"
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of `budget // (L * H)` tokens for each (layer, head)."""
        layers, _, heads, _ = observation.shape
        count = budget // (layers * heads)  # [B]
        kept = select_top(scores, count[None, :, None], observation.body[None, :, None])
        return Plan(tuple(LayerPlan.keep(mask) for mask in kept))
