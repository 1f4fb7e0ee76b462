"""The best partition of a text into slots, by dynamic programming."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvframe.ops import gram_band


@dataclass(frozen=True)
class SlotRule:
    """What a slot may be and costs: lengths in tokens, weights of what is subtracted from the boundary scores."""

    shortest: int
    preferred: int
    longest: int
    dispersion: float
    length: float
    cut: float

    def penalty(self, count: Tensor) -> Tensor:
        """((n - n0) / n0)^2."""
        return ((count - self.preferred) / self.preferred).square()


def dispersion(states: list[Tensor], longest: int) -> Tensor:
    """Return fp64 `[longest, N]`: how unevenly the directions move within `[a, a + n)`, at `[n - 1, a]`.

    The variance of the steps d_t = h_{t+1} - h_t inside, with n - 1 steps divided by n - 2; 0 for fewer than two steps;
    the mean over the depths in `states`, each `[N, hidden]`. The steps' sum telescopes, so the band of a Gram matrix is
    all that is needed."""
    found = []
    for h in states:
        n = len(h)
        longest = min(longest, n)
        gram = gram_band(h.double()[None], longest)[0]  # [longest, N]
        square = gram[0]
        step = torch.zeros_like(square)
        step[1:] = square[1:] + square[:-1] - 2 * gram[1, :-1] if longest > 1 else 0
        total = step.cumsum(0)
        count = torch.arange(longest, device=h.device)[:, None]  # steps inside
        end = (torch.arange(n, device=h.device) + count).clamp_max(n - 1)
        spread = square[end] + square - 2 * gram
        variance = (total[end] - total - spread / count.clamp_min(1)) / (count - 1).clamp_min(1)
        found.append(torch.where(count < 2, 0.0, variance.clamp_min(0)))
    return torch.stack(found).mean(0)


def best_slots(states: list[Tensor], boundary: Tensor, rule: SlotRule) -> list[int]:
    """Return the first token of each slot, increasing, from 0, over N tokens.

    Maximises the sum over slots of

        boundary[a] - cut  (nothing for the first slot)  - rule.dispersion * dispersion - rule.length * penalty

    where a is the slot's first token and `boundary [N]` the strength of the cut before a token. Slots have `shortest`
    to `longest` tokens; only the last may be shorter, if there is no other way. Source: GraceKV, semantic slots."""
    tokens = len(boundary)
    if tokens <= rule.shortest:
        return [0]
    length = torch.arange(1, min(rule.longest, tokens) + 1, device=boundary.device)
    gain = -rule.dispersion * dispersion(states, len(length)) - rule.length * rule.penalty(length.double())[:, None]
    opening = boundary.double() - rule.cut
    opening[0] = 0
    value = (gain + opening).cpu().numpy()  # [longest, N] of the slot [a, a + n) at [n - 1, a]
    best = np.full(tokens + 1, -np.inf)
    best[0] = 0
    came = np.full(tokens + 1, -1)

    def extend(end: int, shortest: int) -> None:
        starts = np.arange(max(0, end - rule.longest), end - shortest + 1)
        found = best[starts] + value[end - starts - 1, starts]
        if len(found) and found.max() > -np.inf:
            best[end], came[end] = found.max(), starts[found.argmax()]

    for end in range(rule.shortest, tokens + 1):
        extend(end, rule.shortest)
    if came[tokens] < 0:
        extend(tokens, 1)
    firsts, end = [], tokens
    while end > 0:
        end = int(came[end])
        firsts.append(end)
    return firsts[::-1]
