"""What the strategies draw is valid, small when it can be, and made of the numbers that describe it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from kvframe.execute import check_plan
from kvframe.spec import PipelineSpec
from kvframe.testing import (
    Geometry,
    Prompts,
    entries,
    geometries,
    observations,
    plans,
    prompts,
    scores,
    segmentations,
    specs,
    variants,
)
from kvframe.testing.case import Case
from kvframe.testing.prompt import Layout
from kvframe.types import Needs

quick = settings(max_examples=25, deadline=None)


def test_they_shrink_to_the_plainest():
    assert find(prompts(), lambda case: True) == Prompts()
    assert find(geometries(), lambda geometry: True) == Geometry()
    case, _ = find(plans(), lambda drawn: max(drawn[0].lengths) > 2)
    assert case == Prompts(lengths=(3,))


@quick
@given(prompts(contents=("random", "huge"), dtypes=(torch.float32, torch.float16)), st.integers(0, 3))
def test_a_row_does_not_depend_on_the_batch(case, left):
    together = case.observation(layout=Layout(left=left, right=1, noise=3))
    for row in range(len(case.lengths)):
        at, alone = case.columns(row, Layout(left=left)), case.alone(row).observation()
        for mine, theirs in zip(together.layers, alone.layers, strict=True):
            for name in ("keys", "values", "queries", "head_outputs"):
                assert torch.equal(getattr(mine, name)[row, :, at], getattr(theirs, name)[0])
        for depth, states in alone.hidden_states.items():
            assert torch.equal(together.hidden_states[depth][row, at], states[0])
        for name in ("positions", "valid", "body", "suffix", "surprisal"):
            assert torch.equal(getattr(together, name)[row, at], getattr(alone, name)[0])
        outside = together.valid[row].clone()
        outside[at] = False
        assert not outside.any()


@quick
@given(st.integers(1, 40), prompts())
def test_an_observation_holds_what_was_asked_for(amount, case):
    seen = case.observation(Needs(queries=amount, hidden_states=(0.5,)))
    last = case.observation()
    tokens = seen.shape[-1]
    for layer, whole in zip(seen.layers, last.layers, strict=True):
        assert torch.equal(layer.queries, whole.queries[:, :, -min(amount, tokens) :])
        assert layer.head_outputs is None
    assert (list(seen.hidden_states), seen.surprisal) == ([0.5], None)


@quick
@given(observations(starts=(5,)))
def test_positions_begin_where_asked(seen):
    assert int(seen.positions[seen.valid].min()) == 5


@quick
@given(plans())
def test_plans_are_valid(drawn):
    case, plan = drawn
    seen = case.observation()
    check_plan(plan, seen, torch.full((len(case.lengths),), 10**9), "drawn")


def test_plans_cover_what_allocators_do():
    def merges(drawn):
        return any(bool((p.assignment.flatten(0, 1).sort(-1).values.diff(dim=-1) == 0).any()) for p in drawn[1].layers)

    find(plans(), lambda drawn: bool((drawn[1].layers[0].n_entries == 0).any()))
    find(plans(), lambda drawn: drawn[1].layers[0].n_entries.unique().numel() > 1)
    find(plans(), lambda drawn: drawn[1].layers[0].assignment.max() >= 0 and merges(drawn))


@quick
@given(plans(ragged=False, merges=False))
def test_plans_keep_to_the_flags(drawn):
    for layer in drawn[1].layers:
        assert (layer.assignment == layer.assignment[:, :1]).all()
        kept = layer.assignment >= 0
        assert torch.equal(kept.sum(-1), layer.n_entries)


@quick
@given(segmentations(), scores(), entries())
def test_the_others_are_valid(segmented, scored, made):
    assert segmented[1].ids.shape == segmented[0].observation().valid.shape
    case, values = scored
    seen = case.observation()
    assert values.shape == seen.shape
    assert not values[~seen.body[None, :, None].expand(seen.shape)].any()
    case, rows = made
    assert rows.bounds[-1] == len(rows.keys) == len(rows.positions)
    assert len(rows.bounds) == len(case.lengths) * case.geometry.kv_heads + 1


@settings(max_examples=10, deadline=None)
@given(specs())
def test_specs_are_valid(spec):
    assert isinstance(spec, PipelineSpec)


@quick
@given(st.integers(0, 8), prompts())
def test_a_full_budget_is_the_body(eighths, case):
    units = case.geometry.layers * case.geometry.kv_heads
    budget = Case(case, eighths=eighths).budget
    body = case.observation().body.sum(1) * units
    assert ((budget <= body) & (budget * 8 > body * eighths - 8)).all()


def test_variants_are_the_choices():
    from kvframe.builtin.segmenters import Chunks

    assert [stage.size for stage in variants(Chunks)] == [64, 1]


def test_variants_need_defaults():
    from pydantic import Field

    from kvframe.builtin.segmenters import Whole
    from kvframe.errors import InputError

    class Wanting(Whole):
        size: int = Field(description="Required.")

    with pytest.raises(InputError, match="Wanting cannot be made without arguments: give size a default"):
        variants(Wanting)
