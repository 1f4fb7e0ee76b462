"""One ranking over everything."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments
from kvframe_baselines.floors import share_budget


class GlobalTopK(Allocator):
    """The highest scores of a batch row over all layers and heads.

        head (l, h) keeps its best floor(floor * budget / (L * H)), the rest goes to the highest scores of all

    The whole budget is spent. Scores must be comparable between layers and heads, as attention probabilities are.
    With `floor: 0` a larger budget keeps a superset. No paper: the plain control for every cleverer allocation."""

    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    name: Literal["baselines.global_top_k"] = "baselines.global_top_k"
    floor: float = Field(
        0.0, ge=0, le=1, description="Share (0 to 1) of a uniform head budget that is safe for every head."
    )

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of exactly the budget, or of the whole body if that is smaller."""
        layers, _, heads, _ = observation.shape
        units = scores.transpose(0, 1).flatten(1, 2)  # [B, L*H, T]
        kept = share_budget(units, budget, observation.body, self.floor)
        by_layer = kept.unflatten(1, (layers, heads)).transpose(0, 1)  # [L, B, H, T]
        return Plan(tuple(LayerPlan.keep(mask) for mask in by_layer))
