"""Scalar quantisers of the normal distribution with the least mean squared error (Lloyd 1957, Max 1960)."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

SOLVED = 6
STEPS = 50


@cache
def normal_levels(width: int) -> Tensor:
    """The `2 ** width` reconstruction levels for N(0, 1), fp64, ascending and symmetric about 0; width 0 to 16.

    Up to 6 bits the optimum: each level is the mean of its cell, each border lies midway between levels. Beyond, the
    companding quantiser whose density of levels is the optimal one for many levels (that of a normal with three times
    the variance), from which the optimum hardly differs."""
    count = 2**width
    wide = NormalDist(sigma=math.sqrt(3))
    levels = torch.tensor([wide.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64)
    if width <= SOLVED:
        levels = _solve(levels)
    return (levels - levels.flip(0)) / 2


def normal_borders(width: int) -> Tensor:
    """The `2 ** width - 1` borders between the cells, fp64: midway between neighbouring levels."""
    levels = normal_levels(width)
    return (levels[1:] + levels[:-1]) / 2


def _solve(levels: Tensor) -> Tensor:
    """Newton's method on `level - mean of its cell = 0`; Lloyd's own iteration takes thousands of sweeps."""
    end = torch.full((1,), torch.inf, dtype=torch.float64)
    for _ in range(STEPS):
        borders = torch.cat([-end, (levels[1:] + levels[:-1]) / 2, end])
        density = (-borders.square() / 2).exp() / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(borders).diff()
        mean = -density.diff() / mass
        # How a cell's mean moves with its lower and its upper border.
        finite = torch.where(borders.isinf(), 0.0, borders)
        lower = density[:-1] * (mean - finite[:-1]) / mass
        upper = density[1:] * (finite[1:] - mean) / mass
        slope = torch.diag(1 - (lower + upper) / 2) - torch.diag(lower[1:] / 2, -1) - torch.diag(upper[:-1] / 2, 1)
        step = torch.linalg.solve(slope, levels - mean)
        levels = levels - step
        if float(step.abs().max()) < 1e-12:
            break
    return levels
