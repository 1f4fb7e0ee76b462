"""A budget that heads share: a safe part for each, the rest to the highest scores of all."""

from __future__ import annotations

from torch import Tensor

from kvframe.ops import select_top


def share_budget(scores: Tensor, budget: Tensor, body: Tensor, floor: float) -> Tensor:
    """Return bool `[..., U, T]`: `budget` tokens (int64 `[...]`) of the `U` units together, or all there are.

    First every unit keeps its best `floor(floor * budget / U)` tokens; the rest of the budget goes to the highest of
    the remaining `scores [..., U, T]`, whichever unit they belong to. Only tokens of `body` bool `[..., T]` are kept;
    ties go to the earlier unit, then the earlier token."""
    units = scores.shape[-2]
    allowed = body[..., None, :].expand(scores.shape)
    safe = (floor * budget.double() / units).floor().long()  # [...]
    kept = select_top(scores, safe[..., None], allowed)
    left = budget - kept.sum((-1, -2))
    best = select_top(scores.flatten(-2), left, (allowed & ~kept).flatten(-2))
    return kept | best.view(scores.shape)
