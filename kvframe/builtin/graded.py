"""An allocator that spends bits instead of entries: what matters less is coded more coarsely before it is dropped."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.ops import grade_tokens
from kvframe.stages import Allocator
from kvframe.types import Grades, LayerPlan, Observation, Plan, Segments


class Graded(Allocator):
    """Gives each token a grade of the encoder, or drops it, under one budget over all layers and heads: the sum of
    `weight * error of the grade` is the least that the budget allows. A token's weight is the scorer's share of its
    head, mixed with a uniform one. With an encoder of a single grade it keeps the tokens of highest weight."""

    name: Literal["graded"] = "graded"
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    chooses_grades: ClassVar[bool] = True

    heads: Literal["joint", "each"] = Field(
        "joint", description="Tokens are graded for all heads of a layer together, or for each head by itself."
    )
    uniform: float = Field(
        0.2, ge=0, le=1, description="Uniform share (0 to 1) of a token's weight; the rest is the scorer's."
    )
    drop: float = Field(
        0.5,
        gt=0,
        description="Loss of a dropped token, where that of a grade is its error. Errors do more harm than gaps.",
    )

    @property
    def agrees(self) -> bool:
        """See Allocator.agrees."""
        return self.heads == "joint"

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of single tokens within the budget."""
        one = Grades.single(observation)
        return self.allocate_graded(observation, segments, scores, budget, one).ungraded()

    def allocate_graded(
        self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor, grades: Grades
    ) -> Plan:
        """Return a plan of graded single tokens within the budget."""
        grade = torch.full(observation.shape, -1, dtype=torch.int64, device=scores.device)
        for row in range(observation.shape[1]):
            body = observation.body[row].nonzero()[:, 0]
            weight = self._weights(scores[:, row][..., body])  # [L, H, N]
            found = grade_tokens(weight, grades, float(budget[row]), joint=self.agrees, drop=self.drop)
            grade[:, row][..., body] = found
        return Plan(tuple(LayerPlan.graded(layer) for layer in grade))

    def _weights(self, scores: Tensor) -> Tensor:
        """Weights of `scores [L, H, N]`, adding up to 1 in each head."""
        count = max(1, scores.shape[-1])
        total = scores.sum(-1, keepdim=True)
        share = torch.where(total > 0, scores / total.clamp_min(1e-30), 1 / count)
        return (1 - self.uniform) * share + self.uniform / count
