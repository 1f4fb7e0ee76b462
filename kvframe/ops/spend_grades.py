"""Which grade each token gets: one budget shared out over the tokens of all units, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvframe.types import Grades

SLACK = 1e-6  # by which an error, a share of 1, may be off, in rounding


def spend_grades(
    weight: Tensor,
    error: Tensor,
    price: Sequence[float],
    budget: float,
    *,
    block: int = 1,
    heads: int = 1,
    drop: float = 1.0,
) -> Tensor:
    """Return the grade of each token, int64 `[U, N]`, -1 = dropped.

    Minimises `sum of weight * loss` over the tokens of `U` units at a cost of at most `budget`: the loss of a dropped
    token is `drop`, that of one of grade g is `error[u, g]`. Tokens of a unit are coded in blocks, in the order of
    their weights, and a block costs `block * heads * price[g]` even if it is not full, so nothing is cheaper than it
    is said to be. Of the grades only those on the lower convex hull of (price, loss) are used; each step from one to
    the next is taken while the budget lasts, that of the greatest gain for its cost first. That is exact but for the
    step that does not fit any more. A dearer grade that loses the same, within rounding, is a step that gains nothing:
    it is taken last, so a budget that pays for every token in the dearest grade buys that.

    Args:
        weight: `[U, N]`, finite, >= 0.
        error: `[U, G]`, of the grades from the cheapest on.
        price: G numbers > 0, ascending.
        budget: in the units of `price`.
        heads: how many a unit stands for."""
    units, tokens = weight.shape
    grade = torch.full((units, tokens), -1, dtype=torch.int64, device=weight.device)
    if tokens == 0:
        return grade
    ranked, order = weight.double().sort(dim=-1, descending=True, stable=True)
    blocks = -(-tokens // block)
    padded = torch.nn.functional.pad(ranked, (0, blocks * block - tokens))
    worth = padded.view(units, blocks, block).sum(-1)  # [U, K], falling
    gain, cost, target = (torch.stack(part).to(weight.device) for part in zip(*hulls(error, price, drop), strict=True))
    steps = gain.shape[1]
    usable = torch.isfinite(gain)
    density = (worth[:, :, None] * torch.where(usable, gain, 0)[:, None]).masked_fill(~usable[:, None], -torch.inf)
    density, best = density.flatten().sort(descending=True, stable=True)
    spent = (cost * block * heads)[:, None].expand(units, blocks, steps).reshape(-1)[best].cumsum(0)
    taken = torch.zeros(len(best), dtype=torch.bool, device=weight.device)
    taken[best] = (spent <= budget * (1 + 1e-12)) & density.isfinite()
    reached = torch.where(taken.view(units, blocks, steps), target[:, None], -1).amax(-1)  # [U, K]
    return grade.scatter_(1, order, reached.repeat_interleave(block, 1)[:, :tokens])


def grade_tokens(worth: Tensor, grades: Grades, budget: float, *, joint: bool, drop: float) -> Tensor:
    """Return the grade of each token of one batch row, int64 `[L, H, N]`, -1 = dropped, for `worth [L, H, N]` and a
    `budget` in entries of the dearest grade: see `spend_grades`. With `joint` the heads of a layer share their tokens'
    grades, and their worths add up."""
    layers, heads, _ = worth.shape
    together = heads if joint else 1
    unit = worth.sum(1) if joint else worth.flatten(0, 1)  # [U, N]
    error = grades.error.repeat_interleave(heads // together, 0)
    found = spend_grades(unit, error, grades.price, budget, block=grades.block, heads=together, drop=drop)
    return found.unflatten(0, (layers, -1)).expand(layers, heads, -1)


def settled(error: Tensor) -> Tensor:
    """Errors fp64 `[…, G]`, from the cheapest grade on: one that lies above the least before it, by no more than
    rounding, is made equal to that."""
    error = error.double()
    least = error.cummin(-1).values
    return torch.where(error <= least + SLACK, least, error)


def hulls(error: Tensor, price: Sequence[float], drop: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each unit the steps along the lower convex hull from dropped to the best grade, in as many places as there
    are grades: gain for a unit of cost (fp64, falling; -inf in places left over), cost, and the grade reached."""
    found = []
    for row in settled(error).tolist():
        points = [(0.0, drop, -1), *zip(price, row, range(len(price)), strict=True)]
        corners: list[tuple[float, float, int]] = []
        for point in points:
            # A grade that costs more and loses more is never used; one that loses the same gains nothing.
            if corners and point[1] > corners[-1][1]:
                continue
            while len(corners) >= 2 and slope(corners[-2], corners[-1]) <= slope(corners[-2], point):
                corners.pop()
            corners.append(point)
        steps = list(pairwise(corners))
        rest = len(price) - len(steps)
        found.append(
            (
                torch.tensor([slope(a, b) for a, b in steps] + [-torch.inf] * rest, dtype=torch.float64),
                torch.tensor([b[0] - a[0] for a, b in steps] + [0.0] * rest, dtype=torch.float64),
                torch.tensor([b[2] for _, b in steps] + [-1] * rest, dtype=torch.int64),
            )
        )
    return found


def slope(before: tuple[float, float, int], after: tuple[float, float, int]) -> float:
    """What is gained for a unit of cost."""
    return (before[1] - after[1]) / (after[0] - before[0])
