"""Prunes a forest for an encoder of several grades: which nodes become entries, and how finely each is coded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.ops import settled
from kvframe.types import Grades
from kvframe_forest.growth import Forest
from kvframe_forest.pruning import Choice, cheapest_pruning


@dataclass(frozen=True, eq=False)
class Offer:
    """What coding costs, for each node.

    Attributes:
        noise: fp64 `[nodes, G]`, what is lost by coding a node with a grade.
        price: fp64 `[G]`, in entries of the dearest grade.
        block: rows of a unit and grade that are paid for together.
        unit: int64 `[nodes]`, whose head a node belongs to; `row` int64 `[units]`, in which batch row that is.
    """

    noise: Tensor
    price: Tensor
    block: int
    unit: Tensor
    row: Tensor

    @classmethod
    def of(
        cls, forest: Forest, points: Tensor, weight: Tensor, unit: Tensor, shape: tuple[int, ...], grades: Grades
    ) -> Offer:
        """For a forest over `points [M, C]` with `weight [M]` in `unit` int64 `[M]`; `shape` are L, B, H. Coding loses
        a share of how far the points of a head are from their mean."""
        layers, batch, heads = shape
        units = layers * batch * heads
        mass, owner = torch.empty_like(forest.loss, dtype=torch.float64), unit.new_empty(len(forest.loss))
        mass[: forest.leaves], owner[: forest.leaves] = weight.double(), unit
        begin = forest.leaves
        for left, right in forest.levels:
            here = slice(begin, begin + len(left))
            mass[here], owner[here] = mass[left] + mass[right], owner[left]
            begin = here.stop
        total = mass.new_zeros(units).index_add_(0, unit, weight.double()).clamp_min(1e-300)
        share = (weight.double() / total[unit]).to(points.dtype)[:, None]
        mean = points.new_zeros(units, points.shape[1]).index_add_(0, unit, points * share)
        apart = mean.index_select(0, unit).sub_(points).square_().sum(-1)
        spread = mass.new_zeros(units).index_add_(0, unit, (apart * share[:, 0]).double())
        lost = spread[:, None] * settled(grades.error).repeat_interleave(batch * heads, 0)  # [units, G]
        row = torch.arange(units, device=unit.device) // heads % batch
        price = torch.tensor(grades.price, dtype=torch.float64, device=unit.device)
        return cls(mass[:, None] * lost[owner], price, grades.block, owner, row)

    def at(self, per_entry: Tensor) -> tuple[Tensor, Tensor]:
        """What each node costs as an entry, and the grade that makes it so, at `per_entry` fp64 `[B]`."""
        cost = self.noise + per_entry[self.row[self.unit], None] * self.price
        least, grade = cost.min(1)
        return least, grade

    def finest(self, drop: Tensor) -> tuple[Choice, Tensor]:
        """The choice that loses least where nothing has a price, and the grade of each node: every leaf for itself,
        unless dropping it (`drop [M]`) loses less; of grades that lose the same the dearest."""
        least = self.noise.min(1, keepdim=True).values
        grade = torch.where(self.noise == least, torch.arange(len(self.price), device=least.device), 0).amax(1)
        entry, lost = (torch.zeros_like(self.unit, dtype=torch.bool) for _ in range(2))
        kept = least[: len(drop), 0] <= drop
        entry[: len(drop)], lost[: len(drop)] = kept, ~kept
        return Choice(entry, lost), grade

    def spent(self, entry: Tensor, grade: Tensor, rows: int) -> Tensor:
        """What the entries cost, fp64 `[B]`."""
        kinds = len(self.price)
        count = torch.bincount((self.unit * kinds + grade)[entry], minlength=len(self.row) * kinds).view(-1, kinds)
        paid = -(-count // self.block) * self.block * self.price
        return paid.new_zeros(rows).index_add_(0, self.row, paid.sum(1))


def prune_graded(forest: Forest, drop: Tensor, offer: Offer, budget: Tensor, steps: int) -> tuple[Choice, Tensor]:
    """The cheapest pruning at the lowest price found, by bisection, whose entries cost no more than `budget` int64
    `[B]`, but for at most a 256th of it; and the grade of each node, int64 `[nodes]`. A budget that pays for the finest
    choice buys that."""
    rows = len(budget)
    row_of_leaf = offer.row[offer.unit[: forest.leaves]]
    most = drop.new_zeros(rows).index_add_(0, row_of_leaf, drop).clamp_min(1e-30) * 2
    low, high = (most * 1e-15).log(), (most / offer.price[0]).log()
    best, best_grade = offer.finest(drop)
    paid = offer.spent(best.entry, best_grade, rows) <= budget
    at, leaf = paid[offer.row[offer.unit]], torch.arange(len(offer.unit), device=drop.device) < forest.leaves
    best = Choice(best.entry & at, torch.where(at, best.lost, leaf))
    most_spent = torch.where(paid, budget, 0).double()
    for _ in range(steps):
        middle = (low + high) / 2
        each, grade = offer.at(middle.exp())
        choice = cheapest_pruning(forest, drop, each)
        spent = offer.spent(choice.entry, grade, rows)
        fits = spent <= budget
        high, low = torch.where(fits, middle, high), torch.where(fits, low, middle)
        # A row that is there stays as it is, whatever the others still need.
        better = fits & (spent >= most_spent) & (budget - most_spent > budget / 256)
        most_spent = torch.where(better, spent, most_spent)
        at = better[offer.row[offer.unit]]
        best = Choice(torch.where(at, choice.entry, best.entry), torch.where(at, choice.lost, best.lost))
        best_grade = torch.where(at, grade, best_grade)
        if bool((budget - most_spent <= budget / 256).all()):
            break
    return best, best_grade
