"""A second turn sees the queries of its own tokens only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvframe.execute import check_plan
from kvframe.types import Segments
from kvframe_gracekv import BudgetFlow, ExactFlow, ValueFlow


@pytest.mark.parametrize("allocator", [ExactFlow(longest=6), BudgetFlow(cuts="midpoint")])
@pytest.mark.parametrize("hops", [0, 2])
@pytest.mark.parametrize("known", [1, 9])
def test_fewer_queries_than_probes(make, allocator, hops, known):
    seen = make([40, 25], recent=2)
    layers = tuple(
        replace(x, queries=x.queries[:, :, -known:], head_outputs=x.head_outputs[:, :, -known:]) for x in seen.layers
    )
    seen = replace(seen, layers=layers)
    segments = Segments((torch.arange(40) // 10).int().expand(2, 40))
    scores = ValueFlow(hops=hops).score(seen, segments)
    assert torch.allclose(scores.sum(-1), torch.ones(2, 2, 2), atol=1e-4)
    budget = torch.tensor([50, 20])
    check_plan(allocator.allocate(seen, segments, scores, budget), seen, budget, "x")


def test_more_than_is_needed_changes_nothing(make):
    seen = make([60, 33], recent=2, suffix=4)
    segments = Segments((torch.arange(60) // 10).int().expand(2, 60))
    for allocator in (ExactFlow(longest=6, probes=3), BudgetFlow(cuts="midpoint", probes=3)):
        needs = allocator.needs
        layers = tuple(
            replace(
                x, queries=x.queries[:, :, -needs.queries :], head_outputs=x.head_outputs[:, :, -needs.head_outputs :]
            )
            for x in seen.layers
        )
        scores = ValueFlow(hops=0).score(seen, segments)
        budget = torch.tensor([60, 20])
        more = allocator.allocate(seen, segments, scores, budget)
        less = allocator.allocate(replace(seen, layers=layers), segments, scores, budget)
        for a, b in zip(more.layers, less.layers, strict=True):
            assert torch.equal(a.assignment, b.assignment)
