"""Segmenters that look at positions only."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from kvframe.stages import Segmenter
from kvframe.types import Observation, Segments


class Whole(Segmenter):
    """The whole prompt is one segment."""

    name: Literal["whole"] = "whole"

    def segment(self, observation: Observation) -> Segments:
        """Return zeros `[B, T]`."""
        return Segments(torch.zeros_like(observation.valid, dtype=torch.int32))


class Chunks(Segmenter):
    """Chunks of equal length, counted from the first valid token of each row, so that left padding changes nothing."""

    name: Literal["chunks"] = "chunks"
    size: int = Field(64, ge=1, description="Tokens in a chunk; the last one may be shorter.")

    def segment(self, observation: Observation) -> Segments:
        """Return the chunk of each token, `[B, T]`; padding before the first token belongs to chunk 0."""
        rank = (observation.valid.cumsum(1) - 1).clamp_min(0)
        return Segments((rank // self.size).int())
