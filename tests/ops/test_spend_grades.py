"""Grades under one budget, held against trying everything."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvframe.ops import grade_tokens, spend_grades
from kvframe.types import Grades, LayerPlan

PRICE = (0.25, 0.5, 1.0)
ERROR = (0.1, 0.03, 0.002)


def loss(weight, grade, error, drop=1.0):
    lost = torch.cat([torch.full((len(error), 1), drop, dtype=torch.float64), error.double()], 1)
    return float((weight.double() * lost.gather(1, grade + 1)).sum())


def cost(grade, price, block=1, heads=1):
    count = torch.stack([(grade == g).sum(1) for g in range(len(price))], 1)
    return float((-(-count // block) * block * heads * torch.tensor(price, dtype=torch.float64)).sum())


@given(st.integers(0, 200), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1)]), st.floats(0, 5))
def test_nothing_that_costs_no_more_loses_less(seed, shape, budget):
    units, tokens = shape
    weight = torch.rand(units, tokens, generator=torch.Generator().manual_seed(seed))
    error = torch.tensor([ERROR]).expand(units, -1)
    found = spend_grades(weight, error, PRICE, budget)
    spent = cost(found, PRICE)
    assert spent <= budget + 1e-9
    for choice in product(range(-1, 3), repeat=units * tokens):
        other = torch.tensor(choice).view(units, tokens)
        if cost(other, PRICE) <= spent:
            assert loss(weight, found, error) <= loss(weight, other, error) + 1e-9


@given(st.integers(0, 200), st.integers(1, 3), st.integers(1, 70), st.sampled_from([1, 4, 32]), st.floats(0, 60))
def test_whole_blocks_are_paid_for(seed, units, tokens, block, budget):
    weight = torch.rand(units, tokens, generator=torch.Generator().manual_seed(seed))
    error = torch.tensor([ERROR]).expand(units, -1)
    found = spend_grades(weight, error, PRICE, budget, block=block, heads=3)
    assert cost(found, PRICE, block, heads=3) <= budget + 1e-9
    ranked = found.gather(1, weight.sort(dim=1, descending=True, stable=True).indices)
    assert bool((ranked.diff(dim=1) <= 0).all()), "what matters more is never errorsr"


def test_a_grade_above_the_hull_is_never_used():
    weight = torch.rand(2, 50, generator=torch.Generator().manual_seed(1))
    # Half of the dearest's price for hardly any of its gain.
    error = torch.tensor([[0.1, 0.09, 0.0]]).expand(2, -1)
    found = [spend_grades(weight, error, PRICE, budget) for budget in range(0, 101, 5)]
    assert not any(bool((grade == 1).any()) for grade in found)


@pytest.mark.parametrize("rounding", [0.0, 1e-9, -1e-9])
@pytest.mark.parametrize("error", [0.03, 0.0])
def test_a_budget_that_pays_for_everything_buys_the_dearest(error, rounding):
    """Whichever of two errors that are the same rounding made the smaller; what gains nothing is bought last."""
    weight = torch.rand(2, 9, generator=torch.Generator().manual_seed(5))
    weight[0, 3] = 0
    errors = torch.tensor([[0.2, error, max(0, error + rounding)], ERROR], dtype=torch.float64)
    everything = spend_grades(weight, errors, PRICE, 24, block=4)
    assert everything.unique().tolist() == [2]
    found = [spend_grades(weight, errors, PRICE, budget, block=4) for budget in range(24)]
    assert any(bool((grade[0] == 2).any()) for grade in found)
    assert all(bool((grade[1] == 2).all()) for grade in found if bool((grade[0] == 2).any()))


def test_a_dearer_grade_that_loses_more_is_never_bought():
    weight = torch.rand(2, 9, generator=torch.Generator().manual_seed(6))
    error = torch.tensor([[0.2, 0.03, 0.031]]).expand(2, -1)
    assert spend_grades(weight, error, PRICE, 100).unique().tolist() == [1]


@pytest.mark.parametrize("budget", [0, 1, 7, 20, 100])
def test_one_grade_keeps_the_heaviest(budget):
    weight = torch.rand(3, 7, generator=torch.Generator().manual_seed(2))
    grade = spend_grades(weight, torch.zeros(3, 1), (1.0,), budget)
    kept = weight.flatten().topk(min(budget, 21)).indices
    assert grade.flatten().ge(0).nonzero()[:, 0].tolist() == sorted(kept.tolist())


def test_layers_that_lose_more_by_errors_codes_get_finer_ones():
    weight = torch.ones(2, 40)
    error = torch.tensor([[0.01, 0.005, 0.001], [0.4, 0.1, 0.001]])
    grade = spend_grades(weight, error, PRICE, 40)
    assert grade[1].float().mean() > grade[0].float().mean()


@pytest.mark.parametrize("joint", [True, False])
def test_heads_share_their_grades_or_do_not(joint):
    worth = torch.rand(2, 3, 17, generator=torch.Generator().manual_seed(4))
    grades = Grades(PRICE, torch.tensor([ERROR, ERROR]), 4)
    found = grade_tokens(worth, grades, 30.0, joint=joint, drop=0.5)
    assert found.shape == worth.shape
    assert sum(float(grades.cost(LayerPlan.graded(layer[None])).sum()) for layer in found) <= 30
    assert bool((found == found[:, :1]).all()) is joint
    unit = worth.sum(1) if joint else worth.flatten(0, 1)
    heads = 3 if joint else 1
    error = grades.error.repeat_interleave(3 // heads, 0)
    again = spend_grades(unit, error, PRICE, 30.0, block=4, heads=heads, drop=0.5)
    assert torch.equal(found, again.view(2, -1, 17).expand(2, 3, 17))


def test_nothing_and_no_weight():
    assert spend_grades(torch.zeros(2, 0), torch.zeros(2, 1), (1.0,), 3).shape == (2, 0)
    assert int((spend_grades(torch.zeros(2, 5), torch.zeros(2, 1), (1.0,), 4) >= 0).sum()) == 4
