"""The scorer that knows nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Observation, Segments


class Uniform(Scorer):
    """Every token scores the same."""

    name: Literal["uniform"] = "uniform"

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return ones `[L, B, H, T]`."""
        return torch.ones(observation.shape, device=observation.valid.device)
