"""Budgets that shrink with depth."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments


class Pyramid(Allocator):
    """PyramidKV: the number of entries per head falls linearly with depth; within a layer each head keeps its best.

        P = budget / (L * H),   last = P / beta,   first = 2 P - last
        if first > body: first = body, last = 2 P - body
        entries per head in layer l = first - l * (first - last) / (L - 1)

    P is kvframe's net budget: sinks and recent window are kept beside it in every layer, as the paper keeps its
    window of instruction tokens beside the pyramid. The counts are rounded by largest remainder, so that they never
    grow with depth and add up to `budget // H` for each head; the `budget % H` entries that would make heads unequal
    stay unspent. Uniform with one layer, with beta 1, and once the budget holds the whole body. A larger budget may
    move a layer's rounding down by one. Source: Cai et al. 2024."""

    paper: ClassVar[str] = "Cai et al., 2024, arXiv 2406.02069"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    name: Literal["baselines.pyramid"] = "baselines.pyramid"
    beta: float = Field(
        20.0,
        ge=1,
        allow_inf_nan=False,
        description="Mean entries per head / entries per head in the last layer; 1 = uniform.",
    )

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of `H * (budget // H)` entries, or of the whole body if that is smaller."""
        counts = self.layer_counts(observation, budget)
        kept = select_top(scores, counts[..., None], observation.body[None, :, None])
        return Plan(tuple(LayerPlan.keep(mask) for mask in kept))

    def layer_counts(self, observation: Observation, budget: Tensor) -> Tensor:
        """Return int64 `[L, B]`, the entries per head of each layer."""
        layers, _, heads, _ = observation.shape
        body = observation.body.sum(1)  # [B]
        total = torch.minimum(budget // heads, layers * body)  # entries of one head over all layers
        mean = total.double() / layers
        first = torch.minimum(2 * mean - mean / self.beta, body.double())
        depth = torch.arange(layers, device=budget.device, dtype=torch.float64) / max(1, layers - 1)
        exact = first - depth[:, None] * (2 * first - 2 * mean) if layers > 1 else mean[None]  # [L, B]
        whole = exact.floor()
        rest = total - whole.sum(0).long()
        remainder = (exact - whole).T  # [B, L]
        extra = select_top(remainder, rest, torch.ones_like(remainder, dtype=torch.bool))
        return whole.long() + extra.T
