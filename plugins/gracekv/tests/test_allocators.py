"""Both allocators: laws, and what the plans mean on the model's own terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvframe.errors import StageError
from kvframe.execute import check_plan, execute
from kvframe.ops import interval_distortion
from kvframe.types import LayerObservation, Segments
from kvframe_gracekv import BudgetFlow, Curvature, ExactFlow, ValueFlow

SCORER = ValueFlow(hops=0, question_probes=3, sequence_probes=2)
ALLOCATORS = [
    ExactFlow(longest=5, probes=3),
    ExactFlow(longest=9, probes=3, loss="mass", sensitivity="none"),
    ExactFlow(longest=1, probes=3, sensitivity="static"),
    BudgetFlow(probes=3, scales=(1, 2), cut_bonus_kind="absolute"),
    BudgetFlow(probes=3, cuts="boundary", floor=0.0, multiplicity="count"),
    BudgetFlow(probes=3, cuts="midpoint", floor_head_cap=1.0),
]
LENGTHS = st.lists(st.sampled_from([4, 7, 33]), min_size=1, max_size=3)


def segment(seen):
    return Curvature(shortest=2, preferred_length=6, longest=9, scales=(1, 2)).segment(seen)


def planned(allocator, seen, share, segments=None):
    segments = segment(seen) if segments is None else segments
    body = seen.shape[0] * seen.shape[2] * seen.body.sum(1)
    budget = (body * share).long()
    scores = torch.where(seen.body[:, None], SCORER.score(seen, segments), 0)
    plan = allocator.allocate(seen, segments, scores, budget)
    check_plan(plan, seen, budget, allocator.name)
    return plan, body, budget


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=range(len(ALLOCATORS)))
@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]))
def test_a_plan_keeps_the_budget_and_a_row_is_the_same_alone(make, allocator, lengths, seed, share):
    shape = {"seed": seed, "sink": 1, "recent": 2}
    seen = make(lengths, **shape, extra=3)
    plan, body, budget = planned(allocator, seen, share)
    spent = sum(layer.n_entries.sum(1) for layer in plan.layers)
    assert share < 1 or torch.equal(spent, body)
    segments = segment(seen)
    for layer in plan.layers:
        offset = 0
        for row in range(len(lengths)):
            for head in range(seen.shape[2]):
                owner = layer.assignment[row, head]
                for entry in range(int(layer.n_entries[row, head])):
                    members = (owner == entry).nonzero()[:, 0]
                    assert (members.diff() == 1).all(), "entries are runs of tokens"
                    assert len(segments.ids[row, members].unique()) == 1, "of one segment"
                    if layer.multiplicity is not None:
                        assert 1 <= float(layer.multiplicity[offset]) <= len(members)
                        assert float(layer.value_weight[row, head, members].sum()) == pytest.approx(1, abs=1e-5)
                    offset += 1
    for row, n in enumerate(lengths):
        alone, _, alone_budget = planned(allocator, make(lengths, **shape, only=row), share)
        assert alone_budget == budget[row]
        for mine, own in zip(plan.layers, alone.layers, strict=True):
            assert torch.equal(mine.assignment[row, :, -n:], own.assignment[0])


@pytest.mark.parametrize("allocator", [ALLOCATORS[0], ALLOCATORS[4]], ids=["exact_flow", "budget_flow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entries_have_the_distortion_that_was_priced(make, allocator, dtype):
    """What core makes of the plan is what the tables said it would be."""
    seen = make([40], seed=3, dtype=dtype)
    plan, _, _ = planned(allocator, seen, 0.3)
    model = seen.model
    scores = SCORER.score(seen, segment(seen))
    probes = torch.arange(37, 40)
    merged = 0
    for index, (layer, seen_layer) in enumerate(zip(plan.layers, seen.layers, strict=True)):
        entries = execute(layer, seen_layer, seen.positions, model.rope)
        queries = seen_layer.queries[0].unflatten(0, (2, 2))[:, torch.arange(3) % 2, probes].double()  # [H, P, D]
        keys, values = seen_layer.keys[0], seen_layer.values[0]
        coherent = allocator.multiplicity == "coherent"
        tables = interval_distortion(
            keys, values, queries, scores[index, 0], model.rope, model.scale, 9, coherent=coherent, impl="reference"
        )
        row = 0
        for head in range(2):
            share = (queries[head] @ keys[head].double().T * model.scale).softmax(-1)
            norm = (queries[head] @ keys[head].double().T * model.scale).logsumexp(-1)
            for entry in range(int(layer.n_entries[0, head])):
                members = (layer.assignment[0, head] == entry).nonzero()[:, 0]
                key, value = entries.keys[row].double(), entries.values[row].double()
                z = share[:, members].sum(-1)
                m = share[:, members] @ values[head, members].double()
                ours = (queries[head] @ key * model.scale + entries.log_multiplicity[row].double() - norm).exp()
                of_mass = (z - ours).square() / z.square()
                of_moment = (m - ours[:, None] * value).square().sum(-1) / m.square().sum(-1)
                lost = float((z * (0.25 * of_mass + 0.75 * of_moment)).mean())
                # Entries are rounded to the model's dtype, which moves a logit of size ~10 by its last place.
                tolerance = {"rel": 1e-3, "abs": 1e-6} if dtype == torch.float32 else {"rel": 0.2, "abs": 0.02}
                said = float(tables.distortion[head, len(members) - 1, members[0]])
                assert said == pytest.approx(lost, **tolerance)
                merged += len(members) > 1
                row += 1
    assert merged > 3


@pytest.mark.parametrize("allocator", [ExactFlow(longest=16), BudgetFlow(cuts="midpoint", floor=0)])
def test_repeated_tokens_collapse_to_few_entries(make, allocator):
    seen = make([48], heads=1, group=1, layers=1)
    still = replace(seen.model, rope=replace(seen.model.rope, inv_freq=torch.zeros(4), scaling=1.0))
    pair = {name: getattr(seen.layers[0], name)[:, :, :3].repeat_interleave(16, 2) for name in ("keys", "values")}
    layer = replace(seen.layers[0], **pair)
    seen = replace(seen, layers=(layer,), model=still)
    segments = Segments((torch.arange(48) // 16).int()[None])
    scores = torch.full(seen.shape, 1 / 48)
    plan = allocator.allocate(seen, segments, scores, torch.tensor([3]))
    assert plan.layers[0].n_entries.tolist() == [[3]]
    assert (plan.layers[0].assignment[0, 0] == torch.arange(48) // 16).all()
    assert torch.allclose(plan.layers[0].multiplicity, torch.tensor(16.0), rtol=1e-4)
    entries = execute(plan.layers[0], layer, seen.positions, still.rope)
    assert torch.allclose(entries.keys, pair["keys"][0, 0, ::16], atol=1e-5)
    assert torch.allclose(entries.values, pair["values"][0, 0, ::16], atol=1e-5)


def test_without_a_question_the_plan_says_so_once(make):
    for allocator in (ALLOCATORS[0], ALLOCATORS[3]):
        assert len(planned(allocator, make([20, 9]), 0.5)[0].notes) == 1
        assert planned(allocator, make([20, 9], suffix=3), 0.5)[0].notes == ()


def test_bad_input_is_one_sentence(make):
    seen = make([20])
    jumping = replace(seen, positions=seen.positions * 2)
    blind = replace(seen, layers=tuple(LayerObservation(x.keys, x.values) for x in seen.layers))
    segments, scores = segment(seen), SCORER.score(seen, segment(seen))
    for allocator in (ALLOCATORS[0], ALLOCATORS[3]):
        with pytest.raises(StageError, match="needs consecutive positions, but those of row 0 jump by 2"):
            allocator.allocate(jumping, segments, scores, torch.tensor([9]))
        with pytest.raises(StageError, match="capture what it `needs`"):
            allocator.allocate(blind, segments, scores, torch.tensor([9]))
    with pytest.raises(ValidationError, match="must be odd"):
        BudgetFlow(floor_pool=4)
