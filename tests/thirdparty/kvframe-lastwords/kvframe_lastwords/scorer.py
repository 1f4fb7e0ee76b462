"""The scorer."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Observation, Segments


class Lastwords(Scorer):
    """The last words of each segment matter most: they have attended all of it, so they stand for it.

        score[t] = ||v_t||_2 * 2 ** (-d_t / half_life)

    where d_t counts the tokens from t to the end of its segment. Direction: near the end, and large value = keep."""

    name: Literal["lastwords.closing"] = "lastwords.closing"
    half_life: float = Field(8.0, gt=0, description="Tokens before the segment's end at which the score has halved.")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return fp32 `[L, B, H, T]`, >= 0, higher = keep."""
        rank = observation.valid.cumsum(1) - 1  # [B, T], counts valid tokens only: padding changes nothing
        ids = (segments.ids - segments.ids[:, :1]).long()  # [B, T]
        ends = torch.zeros_like(rank).scatter_reduce(1, ids, rank, "amax")  # [B, T], the last rank of each segment
        distance = (ends.gather(1, ids) - rank).clamp_min(0)  # [B, T]
        weight = torch.exp2(-distance / self.half_life)  # [B, T]
        norms = torch.stack([layer.values.float().norm(dim=-1) for layer in observation.layers])  # [L, B, H, T]
        return norms * weight[None, :, None]
