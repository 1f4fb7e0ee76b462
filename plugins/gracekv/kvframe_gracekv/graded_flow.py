"""One budget over all layers and tokens, where the resolution of an entry is its bits."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.ops import grade_tokens
from kvframe.stages import Allocator
from kvframe.types import Grades, LayerPlan, Needs, Observation, Plan, Segments
from kvframe_gracekv.exact_flow import NO_QUESTION
from kvframe_gracekv.rows import rows
from kvframe_gracekv.sensitivity import Sensitivity, head_sensitivity


class GradedFlow(Allocator):
    """Coverage against resolution with an encoder that offers several grades. Every token is dropped, or coded with as
    many bits as it is worth, so that

        sum over tokens of (omega * score, mixed with a uniform part) * error of the token's grade

    is the least that one budget over all layers and heads allows. omega is the sensitivity of the head; with `heads:
    joint` the heads of a layer share their tokens' grades, and their worths add up. Source: own; the budget and the
    worths of GraceKV, with bits in place of prototypes."""

    paper: ClassVar[str] = "own, after Tian et al., 2026, arXiv 2608.07001"
    merges: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    chooses_grades: ClassVar[bool] = True

    name: Literal["gracekv.graded_flow"] = "gracekv.graded_flow"
    heads: Literal["joint", "each"] = Field(
        "joint", description="Tokens are graded for all heads of a layer together, or for each head by itself."
    )
    uniform: float = Field(0.2, ge=0, le=1, description="Uniform share (0 to 1) of all worth; the rest is the tokens'.")
    drop: float = Field(
        0.5,
        gt=0,
        description="Loss of a dropped token, where that of a grade is its error. Errors do more harm than gaps.",
    )
    sensitivity: Sensitivity = Field(
        "static_input", description="Weight of a head: by its output weights and what it writes, by the weights, or 1."
    )

    @property
    def agrees(self) -> bool:
        """See Allocator.agrees."""
        return self.heads == "joint"

    @property
    def needs(self) -> Needs:
        """The heads' outputs if they weigh the heads."""
        return Needs(head_outputs=48 if self.sensitivity == "static_input" else 0)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of single tokens within the budget."""
        one = Grades.single(observation)
        return self.allocate_graded(observation, segments, scores, budget, one).ungraded()

    def allocate_graded(
        self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor, grades: Grades
    ) -> Plan:
        """Return a plan of graded single tokens within the budget."""
        grade = torch.full(observation.shape, -1, dtype=torch.int64, device=scores.device)
        asked = True
        for row in rows(observation, 32, 16):
            if not len(row.body):
                continue
            asked &= row.asked
            omega = head_sensitivity(observation, row, self.sensitivity, self.name)
            worth = scores[:, row.index][..., row.body] * omega[..., None]  # [L, H, N]
            worth = (1 - self.uniform) * worth + self.uniform * worth.mean()
            found = grade_tokens(worth, grades, float(budget[row.index]), joint=self.agrees, drop=self.drop)
            grade[:, row.index][..., row.body] = found
        return Plan(tuple(LayerPlan.graded(layer) for layer in grade), () if asked else (NO_QUESTION,))
