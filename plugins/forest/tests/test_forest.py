"""The forest against brute force, and its laws; those of every stage are in tests/conformance."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvframe
from kvframe_forest.growth import Forest, grow
from kvframe_forest.pruning import owners, price, prune

EPS = torch.finfo(torch.float64).eps


def members(forest: Forest) -> list[list[int]]:
    """The leaves below each node."""
    below = [[leaf] for leaf in range(forest.leaves)]
    for left, right in forest.levels:
        below += [below[a] + below[b] for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    return below


def prunings(forest: Forest, drop: torch.Tensor) -> dict[int, float]:
    """The least loss at every number of entries, by listing every pruning of every tree."""
    children = {}
    begin = forest.leaves
    for left, right in forest.levels:
        for offset, pair in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
            children[begin + offset] = pair
        begin += len(left)

    def ways(node: int) -> list[tuple[int, float]]:
        if node < forest.leaves:
            return [(1, 0.0), (0, float(drop[node]))]
        split = [(a + c, b + d) for (a, b), (c, d) in product(*(ways(child) for child in children[node]))]
        return [(1, float(forest.loss[node])), *split]

    table = {0: 0.0}
    for root in forest.roots.nonzero().squeeze(1).tolist():
        new: dict[int, float] = {}
        for (count, loss), (more, extra) in product(table.items(), ways(root)):
            new[count + more] = min(new.get(count + more, float("inf")), loss + extra)
        table = new
    return table


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.floats(1e-4, 3))
def test_a_price_gives_the_cheapest_of_all_prunings(forest_of, seed, heads, tokens, per_entry):
    forest, _, weight, _ = forest_of(seed, heads, tokens)
    drop = weight * 0.7
    row = torch.zeros(len(forest.loss), dtype=torch.long)
    choice, count = price(forest, drop, row, torch.tensor([per_entry], dtype=torch.float64))
    paid = float(forest.loss[choice.entry].sum() + drop[choice.lost[: forest.leaves]].sum()) + per_entry * int(count)
    best = min(loss + per_entry * entries for entries, loss in prunings(forest, drop).items())
    assert paid == pytest.approx(best, rel=64 * EPS, abs=64 * EPS)
    owner = owners(forest, choice)
    below = members(forest)
    assert all(leaf in below[node] for leaf, node in enumerate(owner.tolist()) if node >= 0)
    assert set(owner.tolist()) - {-1} == set(choice.entry.nonzero().squeeze(1).tolist())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.integers(0, 15))
def test_a_budget_is_met_exactly_and_at_best_where_prices_lead(forest_of, seed, heads, tokens, budget):
    """Exactly the budget; and wherever some price leads to that number of entries, no pruning of as many is better."""
    forest, _, weight, _ = forest_of(seed, heads, tokens)
    drop, row = weight * 0.7, torch.zeros(len(forest.loss), dtype=torch.long)
    budget = min(budget, heads * tokens)
    choice = prune(forest, drop, row, torch.tensor([budget]), 60)
    assert int(choice.entry.sum()) == budget
    loss = float(forest.loss[choice.entry].sum() + drop[choice.lost[: forest.leaves]].sum())
    table = prunings(forest, drop)
    assert loss >= table[budget] * (1 - 1e-12) - 1e-12
    # On the lower hull: a price makes it the best of all.
    slopes = [(table[budget] - table[n]) / (n - budget) for n in table if n != budget]
    above = max([s for n, s in zip([n for n in table if n != budget], slopes, strict=True) if n > budget], default=0)
    below = min([s for n, s in zip([n for n in table if n != budget], slopes, strict=True) if n < budget], default=1)
    if above < below * (1 - 1e-6) and above >= 0:
        assert loss == pytest.approx(table[budget], rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 33), st.sampled_from([0.3, 1.0]))
def test_a_nodes_loss_is_that_of_its_tokens(forest_of, seed, heads, tokens, share):
    forest, points, weight, unit = forest_of(seed, heads, tokens, 12, share)
    for node, below in enumerate(members(forest)):
        at, w = points[below], weight[below]
        mean = (w[:, None] * at).sum(0) / w.sum()
        loss = float((w * (at - mean).square().sum(-1)).sum())
        assert float(forest.loss[node]) == pytest.approx(loss, rel=1e-9, abs=1e-12)
        assert len(set(unit[below].tolist())) == 1, "a node belongs to one head"


def test_equal_tokens_merge_at_no_cost():
    """What is equal costs nothing to merge, so half the budget is as good as all of it."""
    points = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat_interleave(2, 0)
    weight, unit = torch.full((12,), 1 / 12, dtype=torch.float64), torch.zeros(12, dtype=torch.long)
    forest = grow(points, weight, unit, unit, 12, 6, 1.0)
    row = torch.zeros(len(forest.loss), dtype=torch.long)
    choice = prune(forest, weight, row, torch.tensor([6]), 60)
    assert float(forest.loss[choice.entry].sum()) < 1e-12
    assert not bool(choice.lost.any())


def test_the_spec_is_registered():
    spec = kvframe.load("forest", {"budget.ratio": 8}).spec
    assert spec.allocator.name == "forest.pruned"
