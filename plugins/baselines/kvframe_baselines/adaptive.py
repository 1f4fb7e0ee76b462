"""Head-wise adaptive budgets within each layer."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.stages import Allocator
from kvframe.types import LayerPlan, Observation, Plan, Segments
from kvframe_baselines.floors import share_budget


class Ada(Allocator):
    """AdaKV: every layer gets the same share of the budget, its heads share that by score.

        layer budget = budget / L (what does not divide goes to the first layers, one each)
        head h keeps its best floor(floor * layer budget / H), the rest of the layer's budget goes to its highest scores

    The whole budget is spent. Heads of one layer get different numbers of entries. With `floor: 0` a larger budget
    keeps a superset; with a floor it may not, as the floor takes from the rest. Source: Feng et al. 2024, algorithm 1
    with the safeguard alpha = `floor`."""

    paper: ClassVar[str] = "Feng et al., 2024, arXiv 2407.11550"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    name: Literal["baselines.ada"] = "baselines.ada"
    floor: float = Field(
        0.2, ge=0, le=1, description="Share (0 to 1) of a uniform head budget that is safe for every head."
    )

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of exactly the budget, or of the whole body if that is smaller."""
        layers = observation.shape[0]
        rounding = layers - 1 - torch.arange(layers, device=budget.device)
        share = (budget + rounding[:, None]) // layers  # [L, B]
        kept = share_budget(scores, share, observation.body.expand(layers, -1, -1), self.floor)
        return Plan(tuple(LayerPlan.keep(mask) for mask in kept))
