"""The best partition of slots into kept intervals and dropped tokens, for a price per entry.

    cost of a slot = sum over kept intervals of (loss + price) + sum over dropped tokens of their loss

By dynamic programming over the end of the last interval, for all slots of all units (layers, heads) at once. Source:
own; the Lagrangian of GraceKV's allocation over all intervals instead of the nodes of one tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    """`begins` and `dropped`, bool `[U, N]`: a token begins an entry, or belongs to none; the others continue the entry
    before them. `count` = number of entries."""

    begins: Tensor
    dropped: Tensor

    @property
    def count(self) -> int:
        return int(self.begins.sum())


class Slots:
    """Losses of all intervals inside slots, laid out by their place in the slot.

    Slots are sorted by length, so that the step for the i-th tokens works on the first slots only: ragged slots waste
    nothing. Losses are held in fp16, relative to `scale` (about what a token is worth): their size is what bounds the
    memory of a compression, and they are estimates whose first digit is all that can be trusted. A loss of more than
    65504 times that becomes infinite, so that no such interval is ever made."""

    def __init__(self, lengths: Tensor, units: int, longest: int, device: torch.device, scale: float = 1.0) -> None:
        order = lengths.argsort(descending=True, stable=True)
        starts = lengths.cumsum(0) - lengths
        self.starts = starts[order].to(device)  # [S]
        self.lengths = lengths[order].to(device)
        self.units, self.tokens, self.scale = units, int(lengths.sum()), scale
        self.deepest = int(lengths.max())
        self.longest = min(longest, self.deepest)
        alive = [int((lengths >= i).sum()) for i in range(self.deepest + 1)]
        self.alive = alive  # slots with at least i tokens
        self.reach = [min(i, self.longest) for i in range(self.deepest + 1)]
        # Where the numbers of each step lie in the tables: intervals that end with the i-th token, longest first.
        steps = range(1, self.deepest + 1)
        self._interval = torch.cat([self._ends(i).flatten() for i in steps])
        self._token = torch.cat([self.starts[: alive[i]] + (i - 1) for i in steps])
        losses = torch.empty(len(self._interval), units, dtype=torch.float16, device=device)
        drops = torch.empty(len(self._token), units, device=device)
        self._losses, self._drops = losses, drops
        sizes = [self.reach[i] * alive[i] for i in steps]
        self.losses = [
            part.view(self.reach[i], alive[i], units) for i, part in zip(steps, losses.split(sizes), strict=True)
        ]  # [reach, slot, unit]
        self.drops = drops.split(alive[1:])  # [slot, unit]

    def _ends(self, i: int) -> Tensor:
        length = torch.arange(self.reach[i], 0, -1, device=self.starts.device)[:, None]
        return (length - 1) * self.tokens + self.starts[: self.alive[i]] + (i - length)  # [reach, S_i]

    def fill(self, units: slice, losses: Tensor, drops: Tensor) -> None:
        """Enter `losses [u, longest, N]` (of `[a, a + n)` at `[n - 1, a]`) and `drops [u, N]` of some units."""
        held = (losses[:, : self.longest] / self.scale).half().flatten(1)
        self._losses[:, units] = held.index_select(1, self._interval).T
        self._drops[:, units] = (drops / self.scale).index_select(1, self._token).T

    def solve(self, price: float) -> tuple[int, list[Tensor]]:
        """Return the number of entries of the best partition at this price and, for each step, the length of the
        interval that ends there (0 = the token is dropped), int16 `[S_i, U]`. At equal cost a token is kept."""
        shape = (self.deepest + 1, len(self.lengths), self.units)
        cost = self.starts.new_zeros(shape, dtype=torch.float32)
        count = self.starts.new_zeros(shape, dtype=torch.int32)
        choices = []
        for i in range(1, self.deepest + 1):
            alive, reach = self.alive[i], self.reach[i]
            before = slice(i - reach, i)
            keep, which = (cost[before, :alive] + self.losses[i - 1]).min(0)
            keep += price / self.scale
            drop = cost[i - 1, :alive] + self.drops[i - 1]
            kept = keep <= drop
            cost[i, :alive] = torch.where(kept, keep, drop)
            entries = count[before, :alive].gather(0, which[None])[0] + 1
            count[i, :alive] = torch.where(kept, entries, count[i - 1, :alive])
            choices.append(torch.where(kept, reach - which, 0).to(torch.int16))
        last = count[self.lengths, torch.arange(len(self.lengths), device=self.lengths.device)]
        return int(last.sum()), choices

    def trace(self, choices: list[Tensor]) -> Solution:
        """Follow the choices back from the end of each slot."""
        device = self.starts.device
        begins = torch.zeros(self.tokens, self.units, dtype=torch.bool, device=device)
        dropped = torch.zeros_like(begins)
        at = self.lengths[:, None].expand(-1, self.units).clone()  # [S, U], tokens still to be explained
        for i in range(self.deepest, 0, -1):
            alive = self.alive[i]
            here, choice = at[:alive] == i, choices[i - 1].long()
            token = self.starts[:alive] + (i - 1)
            dropped[token] = here & (choice == 0)
            slot, unit = (here & (choice > 0)).nonzero(as_tuple=True)
            begins[token[slot] - choice[slot, unit] + 1, unit] = True
            at[:alive] = torch.where(here, i - choice.clamp_min(1), at[:alive])
        return Solution(begins.T.contiguous(), dropped.T.contiguous())


def solve_within(slots: Slots, budget: int, guess: float, steps: int) -> Solution:
    """Return the best partition at the lowest price found whose entries do not exceed `budget`.

    The price is found by bisection in the logarithm, sped up by interpolation, from `guess`; at most `steps` solutions
    are made. Prices at which the count jumps over the budget leave a rest unspent."""
    low, low_count = 0.0, 0  # too many entries
    high, high_count, best = None, 0, None
    price = guess if guess > 0 else 1e-6
    for step in range(steps):
        count, choices = slots.solve(price)
        if count > budget:
            low, low_count = price, count
        else:
            high, high_count, best = price, count, choices
            # The rest is spent on single tokens, which is as good for so few.
            if budget - count <= budget // 256 or price == 0:
                break
        if high is None:
            price *= 8
        elif low == 0:
            # Far below the guess it is time to see whether entries that cost nothing fit as well.
            price = 0.0 if step == 2 else high / 8
        elif step % 3 == 2 or low_count == high_count:
            price = (low * high) ** 0.5
        else:
            # The count falls about like a power of the price.
            ratio = _log(low_count / (budget + 0.5)) / _log(low_count / max(high_count, 0.5))
            price = low * (high / low) ** min(0.95, max(0.05, ratio))
        if high is not None and low and high / low < 1 + 1e-6:
            break
    if best is None:
        # Every partition tried was too large: keep nothing, which is always within budget.
        best = [torch.zeros_like(choice) for choice in choices]
    return slots.trace(best)


def _log(x: float) -> float:
    import math

    return math.log(x)
