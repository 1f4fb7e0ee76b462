"""Prunes a forest: which nodes become entries, under one price an entry and row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe_forest.growth import Forest


@dataclass(frozen=True, eq=False)
class Choice:
    """bool `[nodes]`: `entry` are the nodes that become entries; `lost` the leaves that become nothing."""

    entry: Tensor
    lost: Tensor


def price(forest: Forest, drop: Tensor, row: Tensor, per_entry: Tensor) -> tuple[Choice, Tensor]:
    """Return the cheapest pruning at `per_entry` fp64 `[B]`, and its entries, int64 `[B]`.

    Cost of a tree = the least of: its loss and one price; the cost of its two subtrees; for a leaf: one price, or its
    loss `drop [M]` if it is dropped. `row` int64 `[nodes]`. Exact: dynamic programming from the leaves up."""
    choice = cheapest_pruning(forest, drop, per_entry[row])
    return choice, torch.bincount(row[choice.entry], minlength=len(per_entry))


def cheapest_pruning(forest: Forest, drop: Tensor, each: Tensor) -> Choice:
    """The cheapest pruning where an entry costs `each` fp64 `[nodes]`, beside its loss."""
    cost = torch.empty_like(forest.loss, dtype=torch.float64)
    whole = torch.empty_like(each, dtype=torch.bool)  # better as one entry than as what lies below
    leaves = slice(0, forest.leaves)
    whole[leaves] = each[leaves] <= drop
    cost[leaves] = torch.where(whole[leaves], each[leaves], drop)
    begin = forest.leaves
    for left, right in forest.levels:
        here = slice(begin, begin + len(left))
        below, alone = cost[left] + cost[right], forest.loss[here] + each[here]
        whole[here] = alone <= below
        cost[here] = torch.where(whole[here], alone, below)
        begin = here.stop
    return top_down(forest, whole)


def top_down(forest: Forest, whole: Tensor) -> Choice:
    """The highest nodes where `whole`."""
    reached = forest.roots.clone()
    end = len(whole)
    for left, right in reversed(forest.levels):
        begin = end - len(left)
        inside = reached[begin:end] & ~whole[begin:end]
        reached[left] = inside
        reached[right] = inside
        end = begin
    entry = reached & whole
    lost = reached & ~whole
    lost[forest.leaves :] = False
    return Choice(entry, lost)


def prune(forest: Forest, drop: Tensor, row: Tensor, budget: Tensor, steps: int) -> Choice:
    """Return exactly `budget` int64 `[B]` entries in each row (all leaves if there are no more): the cheapest pruning
    at the lowest price that does not exceed it, found by bisection; what it leaves of the budget goes to the dropped
    leaves of highest loss, then to halving the entries of highest loss."""
    rows = len(budget)
    # At the price of all leaves together nothing is worth an entry.
    most = drop.new_zeros(rows).index_add_(0, row[: forest.leaves], drop).clamp_min(1e-30) * 2
    low, high = (most * 1e-15).log(), most.log()
    best, spent = price(forest, drop, row, high.exp())
    for _ in range(steps):
        middle = (low + high) / 2
        choice, count = price(forest, drop, row, middle.exp())
        fits = count <= budget
        high, low = torch.where(fits, middle, high), torch.where(fits, low, middle)
        better = (fits & (count >= spent))[row]
        best = Choice(torch.where(better, choice.entry, best.entry), torch.where(better, choice.lost, best.lost))
        spent = torch.where(fits & (count >= spent), count, spent)
        if bool((spent == budget).all()):
            return best
    return spend_rest(forest, drop, row, budget - spent, best)


def spend_rest(forest: Forest, drop: Tensor, row: Tensor, left: Tensor, choice: Choice) -> Choice:
    """Spend `left` int64 `[B]` more entries."""
    entry, lost = choice.entry.clone(), choice.lost.clone()
    missing = lost[: forest.leaves].nonzero().squeeze(1)
    taken = missing[first_of(drop[missing], row[missing], left)]
    entry[taken], lost[taken] = True, False
    left = left - torch.bincount(row[taken], minlength=len(left))
    children = forest.loss.new_full((len(forest.loss), 2), -1).long()
    begin = forest.leaves
    for pair in forest.levels:
        children[begin : begin + len(pair[0])] = torch.stack(pair, 1)
        begin += len(pair[0])
    while bool((left > 0).any()):
        merged = entry[forest.leaves :].nonzero().squeeze(1) + forest.leaves
        halved = merged[first_of(forest.loss[merged], row[merged], left)]
        if not len(halved):
            break
        entry[halved] = False
        entry[children[halved].flatten()] = True
        left = left - torch.bincount(row[halved], minlength=len(left))
    return Choice(entry, lost)


def first_of(worth: Tensor, row: Tensor, quota: Tensor) -> Tensor:
    """Indices of the `quota` int64 `[B]` highest of each row."""
    order = worth.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    size = torch.bincount(row, minlength=len(quota))
    rank = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[row[order]]
    return order[rank < quota.clamp_min(0)[row[order]]]


def owners(forest: Forest, choice: Choice) -> Tensor:
    """int64 `[M]`: the entry (a node) of each leaf, -1 if it is dropped."""
    owner = torch.full_like(choice.entry, -1, dtype=torch.int64)
    entry = choice.entry.nonzero().squeeze(1)
    owner[entry] = entry
    end = len(owner)
    for left, right in reversed(forest.levels):
        begin = end - len(left)
        for child in (left, right):
            owner[child] = torch.where(owner[begin:end] >= 0, owner[begin:end], owner[child])
        end = begin
    return owner[: forest.leaves]
