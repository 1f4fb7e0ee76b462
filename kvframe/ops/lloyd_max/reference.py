"""Scalar quantisers of the normal distribution with the least mean squared error (Lloyd 1957, Max 1960)."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

ITERATED = 6
SWEEPS = 2000


@cache
def normal_levels(width: int) -> Tensor:
    """The `2 ** width` reconstruction levels for N(0, 1), fp64, ascending and symmetric about 0; width 0 to 16.

    Up to 6 bits Lloyd's iteration to its fixed point; beyond, the companding quantiser whose density of levels is the
    optimal one for many levels (that of a normal three times as wide in variance), which is what the iteration tends
    to."""
    count = 2**width
    middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    wide = NormalDist(sigma=math.sqrt(3))
    levels = [wide.inv_cdf(float(p)) for p in middle]
    if width <= ITERATED:
        levels = _lloyd(levels)
    half = torch.tensor(levels, dtype=torch.float64)
    return (half - half.flip(0)) / 2


def normal_borders(width: int) -> Tensor:
    """The `2 ** width - 1` borders between the cells, fp64: midway between neighbouring levels."""
    levels = normal_levels(width)
    return (levels[1:] + levels[:-1]) / 2


def _lloyd(levels: list[float]) -> list[float]:
    """Move borders midway between levels and levels to their cells' means until nothing moves."""
    normal = NormalDist()
    for _ in range(SWEEPS):
        borders = [(a + b) / 2 for a, b in pairwise(levels)]
        cdf = [0.0, *(normal.cdf(b) for b in borders), 1.0]
        pdf = [0.0, *(normal.pdf(b) for b in borders), 0.0]
        new = [(pdf[i] - pdf[i + 1]) / (cdf[i + 1] - cdf[i]) for i in range(len(levels))]
        moved = max(abs(a - b) for a, b in zip(new, levels, strict=True))
        levels = new
        if moved < 1e-12:
            break
    return levels
