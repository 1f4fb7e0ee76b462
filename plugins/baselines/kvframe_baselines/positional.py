"""Scores from the position alone."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Observation, Segments


class Streaming(Scorer):
    """Newer tokens score higher.

        score[t] = number of valid tokens of the row up to t

    Direction: newer = keep. Source: Xiao et al. 2023 (StreamingLLM). The sinks are core's `protect.sink`, so that
    with `top_k` the sinks and the last tokens stay. Cached keys keep their positions; the paper counts positions
    within the cache."""

    paper: ClassVar[str] = "Xiao et al., 2023, arXiv 2309.17453"

    name: Literal["baselines.streaming"] = "baselines.streaming"

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the count of tokens, fp32 `[L, B, H, T]`; exact up to 16 million tokens."""
        return observation.valid.cumsum(1).float()[None, :, None].expand(observation.shape)
