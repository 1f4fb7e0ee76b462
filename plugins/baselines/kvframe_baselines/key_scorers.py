"""Scores from the keys alone: short keys (key norm) and keys unlike the others (KeyDiff)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Observation, Segments


class KeyNorm(Scorer):
    """Keys of low norm, which tend to be attended much.

        score[t] = 1 / (1 + ||k_t||_2)

    Direction: short key = keep. Source: Devoto et al. 2024, which ranks by -||k||; this is the same
    ranking, positive and finite."""

    paper: ClassVar[str] = "Devoto et al., 2024, arXiv 2406.11430"

    name: Literal["baselines.key_norm"] = "baselines.key_norm"

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return fp32 `[L, B, H, T]`, between 0 and 1."""
        norms = torch.stack([layer.keys.float().norm(dim=-1) for layer in observation.layers])
        return 1 / (1 + norms)


class KeyDiff(Scorer):
    """Keys that point away from the mean direction of all keys.

        score[t] = 1 - cos(k_t, mean over valid s of k_s / ||k_s||)

    Direction: unlike the others = keep. Source: Park et al. 2025, which ranks by -cos; the 1 makes it >=
    0."""

    paper: ClassVar[str] = "Park et al., 2025, arXiv 2504.15364"

    name: Literal["baselines.keydiff"] = "baselines.keydiff"

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return fp32 `[L, B, H, T]`, between 0 and 2."""
        valid = observation.valid
        share = valid.float() / valid.sum(1, keepdim=True).clamp_min(1)  # [B, T]
        scores = []
        for layer in observation.layers:
            directions = F.normalize(layer.keys.float(), dim=-1)  # [B, H, T, D]
            anchor = F.normalize(share[:, None, None] @ directions, dim=-1)  # [B, H, 1, D]
            scores.append(1 - (directions * anchor).sum(-1))
        return torch.stack(scores).clamp_min(0)
