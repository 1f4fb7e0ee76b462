"""Semantic slots: cuts where the text turns."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kvframe.errors import StageError
from kvframe.stages import Segmenter
from kvframe.types import Needs, Observation, Segments
from kvframe_gracekv.curvature import curvature, directions, robust_z
from kvframe_gracekv.slots import SlotRule, best_slots


def row_states(observation: Observation, depths: tuple[float, ...], index: int, owner: str) -> list[Tensor]:
    """The directions `[n, hidden]` of a row's valid tokens at each depth. Raises StageError if one was not observed."""
    missing = [depth for depth in depths if depth not in observation.hidden_states]
    if missing:
        raise StageError(
            f"'{owner}' needs the hidden states at depth {missing[0]}, but the observation has none; capture what it "
            "`needs`."
        )
    valid = observation.valid[index]
    return [directions(observation.hidden_states[depth][index][valid]) for depth in depths]


class Curvature(Segmenter):
    """GraceKV's semantic slots, one partition for all layers and heads.

        boundary_i = z(curvature_i) + surprisal_weight * z(surprisal_i),   z robust, over the row's tokens

    A cut after token i earns boundary_i - cut_cost, a slot pays for the dispersion of its hidden states and for its
    distance from the preferred length; the partition of the body that maximises the sum is found exactly. Tokens before
    the body join the padding in a segment of their own, so do those behind it. `Segments.boundary` at a token is the
    strength of the cut before it. Source: Tian et al. 2026, semantic slots."""

    paper: ClassVar[str] = "Tian et al., 2026, arXiv 2608.07001"

    name: Literal["gracekv.curvature"] = "gracekv.curvature"
    depths: tuple[float, ...] = Field(
        (0.33, 0.5, 0.67), min_length=1, description="Relative depths (0 to 1) of the hidden states."
    )
    scales: tuple[int, ...] = Field((4, 8, 16), min_length=1, description="Tokens before and after that are compared.")
    stability: float = Field(0.25, ge=0, description="Weight of the spread over depths and scales, subtracted.")
    surprisal_weight: float = Field(0.15, ge=0, description="Weight of surprisal beside curvature; 0 = not observed.")
    shortest: int = Field(16, ge=1, description="Tokens in a slot at least.")
    preferred_length: int = Field(64, ge=1, description="Tokens in a slot that cost nothing.")
    longest: int = Field(128, ge=1, description="Tokens in a slot at most.")
    dispersion_weight: float = Field(0.25, ge=0, description="Weight of the dispersion inside a slot.")
    length_weight: float = Field(0.1, ge=0, description="Weight of the squared relative distance from that length.")
    cut_cost: float = Field(
        1.0, allow_inf_nan=False, description="What a cut must earn, in robust standard deviations."
    )

    @model_validator(mode="after")
    def _lengths_fit(self) -> Curvature:
        if not self.shortest <= self.longest:
            raise ValueError(f"shortest ({self.shortest}) must not exceed longest ({self.longest})")
        if any(not 0 <= depth < 1 for depth in self.depths) or any(scale < 1 for scale in self.scales):
            raise ValueError("depths must lie in [0, 1) and scales must be at least 1")
        return self

    @property
    def needs(self) -> Needs:
        """Hidden states at the depths, and surprisal."""
        return Needs(hidden_states=self.depths, surprisal=self.surprisal_weight > 0)

    def segment(self, observation: Observation) -> Segments:
        """Return the slot of each token. Raises StageError for surprisal that is not finite."""
        cuts = torch.zeros_like(observation.valid)
        strength = torch.zeros(observation.valid.shape, device=observation.valid.device)
        rule = SlotRule(
            self.shortest,
            self.preferred_length,
            self.longest,
            self.dispersion_weight,
            self.length_weight,
            self.cut_cost,
        )
        for index in range(len(observation.valid)):
            valid, body = observation.valid[index].nonzero()[:, 0], observation.body[index].nonzero()[:, 0]
            if not len(valid):
                continue
            states = row_states(observation, self.depths, index, self.name)
            boundary = robust_z(curvature(states, self.scales, self.stability))
            if self.surprisal_weight > 0:
                boundary = boundary + self.surprisal_weight * robust_z(self._surprisal(observation, index))
            strength[index, valid[1:]] = boundary[:-1]
            if not len(body):
                continue
            inside = torch.isin(valid, body)
            firsts = best_slots([h[inside] for h in states], strength[index, body], rule)
            cuts[index, body[torch.tensor(firsts, device=body.device)]] = True
            cuts[index, body[0]] = bool(valid[0] != body[0])
            if valid[-1] != body[-1]:
                cuts[index, int(body[-1]) + 1] = True
        return Segments(cuts.cumsum(1, dtype=torch.int32), strength)

    def _surprisal(self, observation: Observation, index: int) -> Tensor:
        if observation.surprisal is None:
            raise StageError(
                f"'{self.name}' needs surprisal, but the observation has none; capture what it `needs` or set "
                "surprisal_weight: 0."
            )
        values = observation.surprisal[index][observation.valid[index]]
        if not bool(values.isfinite().all()):
            raise StageError(
                f"'{self.name}' got surprisal that is not finite in row {index}, so the model's logits are broken; set "
                "surprisal_weight: 0 to do without."
            )
        return values
