"""Graded pruning against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvframe.types import Grades
from kvframe_forest.grading import Offer, prune_graded
from kvframe_forest.growth import grow
from kvframe_forest.pruning import owners

PRICE, ERROR = (0.25, 1.0), [0.2, 0.01]


def offered(forest, points, weight, unit, heads, block=1):
    grades = Grades(PRICE, torch.tensor([ERROR]), block)
    return Offer.of(forest, points, weight, unit, (1, 1, heads), grades)


def everything(forest, drop, offer):
    """`(cost, loss)` of every pruning with every choice of grades."""
    children, begin = {}, forest.leaves
    for left, right in forest.levels:
        for offset, pair in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
            children[begin + offset] = pair
        begin += len(left)

    def ways(node):
        here = [(PRICE[g], float(forest.loss[node] + offer.noise[node, g])) for g in range(2)]
        if node < forest.leaves:
            return [*here, (0.0, float(drop[node]))]
        return [*here, *((a + c, b + d) for (a, b), (c, d) in product(*(ways(child) for child in children[node])))]

    found = [(0.0, 0.0)]
    for root in forest.roots.nonzero().squeeze(1).tolist():
        found = [(a + c, b + d) for (a, b), (c, d) in product(found, ways(root))]
    return found


@given(st.integers(0, 10**6), st.sampled_from([(1, 2), (1, 5), (2, 2), (3, 1)]), st.integers(0, 5))
def test_nothing_that_costs_no_more_loses_less(forest_of, seed, shape, budget):
    heads, tokens = shape
    forest, points, weight, unit = forest_of(seed, heads, tokens)
    drop = weight * 0.7
    offer = offered(forest, points, weight, unit, heads)
    choice, grade = prune_graded(forest, drop, offer, torch.tensor([budget]), 40)
    spent = float(offer.spent(choice.entry, grade, 1))
    assert spent <= budget
    entry = choice.entry.nonzero().squeeze(1)
    lost = float(forest.loss[entry].sum() + offer.noise[entry, grade[entry]].sum())
    lost += float(drop[choice.lost[: forest.leaves]].sum())
    best = min(loss for cost, loss in everything(forest, drop, offer) if cost <= spent + 1e-9)
    assert lost <= best + 1e-9


@given(st.integers(0, 10**6), st.integers(0, 40))
def test_whole_blocks_are_paid_for(forest_of, seed, budget):
    forest, points, weight, unit = forest_of(seed, 2, 30)
    offer = offered(forest, points, weight, unit, 2, block=4)
    choice, grade = prune_graded(forest, weight * 0.7, offer, torch.tensor([budget]), 40)
    count = torch.stack([
        torch.bincount(offer.unit[choice.entry & (grade == g)], minlength=2) for g in range(2)
    ])  # fmt: skip
    assert float((-(-count // 4) * 4 * torch.tensor(PRICE)[:, None]).sum()) <= budget
    assert bool((choice.entry & choice.lost).any()) is False


def test_what_coding_loses_is_measured_from_the_mean(forest_of):
    """A head whose tokens are all alike loses nothing by coding; twice the distance loses four times as much."""
    forest, points, weight, unit = forest_of(3, 2, 6)
    points = torch.cat([points[:6], 5.0 + 2 * points[:6]])
    weight = torch.cat([weight[:6], weight[:6]])
    noise = offered(forest, points, weight, unit, 2).noise[:12]
    assert torch.allclose(noise[6:], 4 * noise[:6])
    alike = offered(forest, torch.ones_like(points), weight, unit, 2).noise
    assert float(alike.abs().max()) == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 60))
def test_a_row_in_a_batch_is_as_alone(forest_of, seed, mine, other):
    """However long the search for the other row's price goes on."""
    heads, tokens = 2, 40
    forest, points, weight, unit = forest_of(seed, heads, tokens)
    weights, units = torch.cat([weight, weight.flip(0)]), torch.arange(2 * heads).repeat_interleave(tokens)
    row = units // heads
    both = grow(torch.cat([points, points.flip(0)]), weights, units, row, 8, 6, 1.0)
    grades = Grades(PRICE, torch.tensor([ERROR]), 4)
    offer = Offer.of(both, torch.cat([points, points.flip(0)]), weights, units, (1, 2, heads), grades)
    choice, grade = prune_graded(both, weights * 0.7, offer, torch.tensor([mine, other]), 40)
    alone_offer = offered(forest, points, weight, unit, heads, block=4)
    alone, alone_grade = prune_graded(forest, weight * 0.7, alone_offer, torch.tensor([mine]), 40)
    together, single = owners(both, choice)[: heads * tokens], owners(forest, alone)
    assert torch.equal(together >= 0, single >= 0)
    kept = single >= 0
    assert torch.equal(grade[together[kept]], alone_grade[single[kept]])


@pytest.mark.parametrize("rounding", [0.0, 1e-9, -1e-9])
def test_a_budget_that_pays_for_everything_buys_the_dearest(forest_of, rounding):
    """Whichever of two errors that are the same rounding made the smaller; a row that cannot pay is as before."""
    forest, points, weight, unit = forest_of(4, 2, 9)
    grades = Grades(PRICE, torch.tensor([[0.03, 0.03 + rounding]], dtype=torch.float64), 4)
    offer = Offer.of(forest, points, weight, unit, (1, 1, 2), grades)
    choice, grade = prune_graded(forest, weight * 9, offer, torch.tensor([2 * 12]), 40)
    assert choice.entry.nonzero()[:, 0].tolist() == list(range(18))
    assert grade[choice.entry].unique().tolist() == [1]
    choice, grade = prune_graded(forest, weight * 9, offer, torch.tensor([2 * 12 - 1]), 40)
    assert float(offer.spent(choice.entry, grade, 1)) <= 2 * 12 - 1
