"""Plans and their execution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import info, observation

from kvframe.builtin.encoders import Dense, Int8
from kvframe.errors import StageError
from kvframe.execute import check_plan, execute
from kvframe.ragged import join_rows
from kvframe.types import LayerPlan, Plan


def random_plan(seen, seed, weighted=False):
    """A plan that drops some body tokens and groups the others at random."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in seen.layers:
        _, batch, heads, tokens = seen.shape
        raw = torch.randint(-1, 4, (batch, heads, tokens), generator=generator)
        raw = torch.where(seen.body[:, None], raw, -1)
        assignment, counts = torch.full_like(raw, -1, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.long)
        for b in range(batch):
            for h in range(heads):
                names = [v for v in raw[b, h].unique().tolist() if v >= 0]
                counts[b, h] = len(names)
                for new, old in enumerate(names):
                    assignment[b, h][raw[b, h] == old] = new
        weights = None
        if weighted:
            weights = torch.rand(batch, heads, tokens, generator=generator) + 0.1
            for b in range(batch):
                for h in range(heads):
                    for e in range(int(counts[b, h])):
                        chosen = assignment[b, h] == e
                        weights[b, h][chosen] /= weights[b, h][chosen].sum()
        layers.append(LayerPlan(assignment, counts, weights, weights))
    return Plan(tuple(layers))


LENGTHS = st.lists(st.integers(1, 17), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), st.booleans())
def test_execute_is_a_loop(lengths, seed, weighted):
    seen = observation(lengths, seed=seed)
    plan = random_plan(seen, seed, weighted)
    check_plan(plan, seen, torch.full((len(lengths),), 10**9), "test")
    rope = seen.model.rope
    for layer_plan, layer in zip(plan.layers, seen.layers, strict=True):
        entries = execute(layer_plan, layer, seen.positions, rope)
        row = 0
        for b in range(len(lengths)):
            for h in range(2):
                for e in range(int(layer_plan.n_entries[b, h])):
                    members = (layer_plan.assignment[b, h] == e).nonzero()[:, 0]
                    weights = torch.full((len(members),), 1 / len(members))
                    if weighted:
                        weights = layer_plan.key_weight[b, h, members]
                    at = round(float(seen.positions[b, members].double().mean()))
                    plain = rope.unrotate(layer.keys[b, h, members], seen.positions[b, members])
                    key = rope.rotate((weights[:, None] * plain).sum(0, keepdim=True), torch.tensor([at]))[0]
                    if len(members) == 1:
                        assert torch.equal(entries.keys[row], layer.keys[b, h, members[0]])
                    assert torch.allclose(entries.keys[row], key, atol=1e-5)
                    assert torch.allclose(entries.values[row], weights @ layer.values[b, h, members], atol=1e-5)
                    count = 0.0 if entries.log_multiplicity is None else float(entries.log_multiplicity[row])
                    assert count == pytest.approx(math.log(len(members)), abs=1e-6)
                    assert int(entries.positions[row]) == at
                    row += 1
        assert row == len(entries.keys)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 10**6))
def test_keeping_copies_bit_by_bit(lengths, seed):
    seen = observation(lengths, seed=seed, dtype=torch.bfloat16)
    kept = torch.rand(seen.shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    kept &= seen.body[None, :, None]
    for mask, layer in zip(kept, seen.layers, strict=True):
        entries = execute(LayerPlan.keep(mask), layer, seen.positions, seen.model.rope)
        assert torch.equal(entries.keys, layer.keys[mask])
        assert torch.equal(entries.values, layer.values[mask])
        assert entries.log_multiplicity is None
        assert torch.equal(entries.positions, seen.positions[:, None].expand(mask.shape)[mask].int())


def test_a_plan_is_checked():
    seen = observation([6, 4])
    kept = seen.body[:, None].expand(2, 2, 6)
    good = LayerPlan.keep(kept)

    def plan(layer):
        return Plan((good, layer))

    plenty = torch.tensor([99, 99])
    check_plan(plan(good), seen, plenty, "a")
    with pytest.raises(StageError, match="row 0, but the budget is 5"):
        check_plan(plan(good), seen, torch.tensor([5, 99]), "a")
    with pytest.raises(StageError, match="outside the body in layer 1"):
        check_plan(plan(LayerPlan.keep(torch.ones_like(kept))), seen, plenty, "a")
    with pytest.raises(StageError, match="each with at least one token"):
        check_plan(plan(LayerPlan(good.assignment, good.n_entries + 1)), seen, plenty, "a")
    with pytest.raises(StageError, match=r"assignment must have shape \[2, 2, 6\]"):
        check_plan(plan(LayerPlan(good.assignment[:, :1], good.n_entries)), seen, plenty, "a")
    with pytest.raises(StageError, match="planned 1 layers, but 2"):
        check_plan(Plan((good,)), seen, plenty, "a")


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), st.sampled_from([Dense(), Int8()]))
def test_joining_codes_is_coding_the_joined(lengths, seed, encoder):
    seen = observation(lengths, seed=seed)
    layer = seen.layers[0]
    first = torch.rand(seen.shape[1:], generator=torch.Generator().manual_seed(seed)) > 0.5
    first &= seen.body[:, None]
    # The first part holds earlier tokens of each head, so that joining keeps the order by position.
    cut = torch.arange(seen.shape[-1]) < seen.shape[-1] // 2
    parts = [
        encoder.encode(execute(LayerPlan.keep(first & side), layer, seen.positions, seen.model.rope), ())
        for side in (cut, ~cut)
    ]
    whole = encoder.encode(execute(LayerPlan.keep(first), layer, seen.positions, seen.model.rope), ())
    joined = join_rows(*parts)
    assert joined.bounds == whole.bounds
    assert torch.equal(joined.positions, whole.positions)
    for name, codes in whole.codes.items():
        assert torch.equal(joined.codes[name], codes)


def test_joining_counts_missing_multiplicities_as_one():
    seen = observation([6])
    layer, none = seen.layers[0], torch.zeros(1, 2, 6, dtype=torch.bool)
    kept = none.clone()
    kept[..., :2] = True
    merged = LayerPlan(torch.tensor([-1, -1, 0, 0, 0, -1], dtype=torch.int32).expand(1, 2, 6), torch.ones(1, 2).long())
    encoder, rope = Dense(), info().rope
    parts = [encoder.encode(execute(p, layer, seen.positions, rope), ()) for p in (LayerPlan.keep(kept), merged)]
    assert join_rows(*parts).log_multiplicity.exp().round().tolist() == [1, 1, 3, 1, 1, 3]
