"""Grows the binary forest of each head: passes of chunked soft matching, every merge a node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvframe.ops import soft_matching

# Likeness is compared to 17 bits, so that what differs by rounding only is a tie.
BITS = 2.0**17


@dataclass(frozen=True, eq=False)
class Forest:
    """`M` leaves (tokens) and the nodes above them.

    Attributes:
        leaves: `M`.
        levels: for each pass `(left, right)` int64 `[k]`, the children of its nodes. Nodes are numbered from `M` on in
            the order of the passes.
        loss: fp32 or fp64 `[nodes]`, what it costs to hold a node as one entry; 0 for leaves.
    """

    leaves: int
    levels: tuple[tuple[Tensor, Tensor], ...]
    loss: Tensor

    @cached_property
    def roots(self) -> Tensor:
        """bool `[nodes]`: nobody's child."""
        alone = torch.ones(len(self.loss), dtype=torch.bool, device=self.loss.device)
        for left, right in self.levels:
            alone[left], alone[right] = False, False
        return alone


def grow(
    points: Tensor, weight: Tensor, unit: Tensor, row: Tensor, chunk: int, passes: int, max_share: float
) -> Forest:
    """Grow the forest over `points [M, C]` with `weight [M]` > 0; `unit` int64 `[M]` says whose head a point is (equal
    ones next to each other, in the order of the text), `row` int64 `[M]` which batch row.

    A pass cuts the nodes of each unit into chunks; those at even places find, among those at odd places, the partner
    that adds least to the loss

        w_a w_b / (w_a + w_b) |x_a - x_b|^2

    (the weighted squared distance of the points to their mean is the loss of a node, and this is what a merge adds to
    that of both). A partner takes the best of those who want it; of a row's merges the cheapest `max_share` of its
    sources are made. A merge is a node at its partner's place."""
    rows, mass = points.clone(), weight.clone()
    leaves = len(points)
    node = torch.arange(leaves, device=points.device)  # the node that stands at a place
    loss = [points.new_zeros(leaves)]
    at_place = points.new_zeros(leaves)
    alive, levels, count = node.clone(), [], leaves
    for _ in range(passes):
        where = unit[alive]
        rank = places(where)
        sources, targets = sides(where * (leaves + 1) + rank // chunk, alive)
        likeness, partner = soft_matching(rows, sources, targets, "ward", mass)
        found = partner >= 0
        source, target, likeness = sources[found], partner[found], rounded(likeness[found])
        quota = (torch.bincount(row[source], minlength=int(row.max()) + 1 if leaves else 1) * max_share).ceil().long()
        best = torch.full_like(mass, -torch.inf).scatter_reduce_(0, target, likeness, "amax")
        order = torch.arange(len(source), device=source.device)
        wins = likeness == best[target]
        first = torch.full_like(node, len(source)).scatter_reduce_(0, target[wins], order[wins], "amin")
        wins &= first[target] == order
        source, target, likeness = source[wins], target[wins], likeness[wins]
        chosen = cheapest(likeness, row[source], quota)
        source, target = source[chosen], target[chosen]
        if not len(source):
            break
        a, b = mass[source], mass[target]
        apart = rows.index_select(0, source) - rows.index_select(0, target)
        added = apart.square().sum(-1) * (a * b / (a + b))
        rows.index_add_(0, target, apart.mul_((a / (a + b))[:, None]))
        mass[target] = a + b
        at_place[target] += at_place[source] + added
        levels.append((node[target], node[source]))
        node[target] = count + torch.arange(len(source), device=source.device)
        count += len(source)
        loss.append(at_place[target])
        gone = torch.zeros_like(node, dtype=torch.bool)
        gone[source] = True
        alive = alive[~gone[alive]]
    return Forest(leaves, tuple(levels), torch.cat(loss))


def rounded(values: Tensor) -> Tensor:
    """The values to 17 bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * BITS).round() / BITS, exponent)


def places(unit: Tensor) -> Tensor:
    """int64 `[M]`: the place of each item among those of its unit, which stand next to each other."""
    items = torch.arange(len(unit), device=unit.device)
    if not len(unit):
        return items
    run = torch.zeros_like(items)
    torch.cumsum(unit[1:] != unit[:-1], 0, out=run[1:])
    length = run.bincount()
    return items - (length.cumsum(0) - length)[run]


def sides(label: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """`(sources [P, a], targets [P, b])`: the `items` at even and at odd places of each run of equal labels; -1 =
    none."""
    if not len(label):
        return items.view(0, 1), items.view(0, 1)
    run = torch.zeros_like(label)
    torch.cumsum(label[1:] != label[:-1], 0, out=run[1:])
    place = places(run)
    width = int(place.max()) // 2 + 1
    out = items.new_full((2, int(run[-1]) + 1, width), -1)
    out[place % 2, run, place // 2] = items
    return out[0], out[1]


def cheapest(likeness: Tensor, row: Tensor, quota: Tensor) -> Tensor:
    """bool `[K]`: the `quota` int64 `[B]` highest of each row; ties go to the earlier one."""
    order = likeness.argsort(descending=True, stable=True)
    if len(quota) > 1:
        order = order[row[order].argsort(stable=True)]
    size = torch.bincount(row, minlength=len(quota))
    ordered = row[order]
    rank = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[ordered]
    return torch.empty_like(row, dtype=torch.bool).scatter_(0, order, rank < quota[ordered])
