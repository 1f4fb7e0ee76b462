"""Random forests."""

from __future__ import annotations

import pytest
import torch

from kvframe_forest.growth import grow


def forest_of(seed: int, heads: int, tokens: int, passes: int = 6, share: float = 1.0):
    """A forest of `heads` heads of one row, with its points, weights and units, fp64."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(heads * tokens, 3, generator=generator, dtype=torch.float64)
    weight = torch.rand(heads * tokens, generator=generator, dtype=torch.float64) + 0.05
    unit = torch.arange(heads).repeat_interleave(tokens)
    return grow(points, weight, unit, torch.zeros_like(unit), 8, passes, share), points, weight, unit


@pytest.fixture(name="forest_of", scope="session")
def _forest_of():
    return forest_of
