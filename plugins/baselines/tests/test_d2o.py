"""D2O against loops, and its laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.execute import check_plan, execute
from kvframe_baselines import D2O

LENGTHS = st.lists(st.sampled_from([1, 2, 7, 33]), min_size=1, max_size=3)


def planned(allocator, observation, seed, share):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.where(observation.body[:, None], torch.rand(observation.shape, generator=generator), 0)
    budget = (observation.shape[0] * observation.shape[2] * observation.body.sum(1) * share).long()
    return allocator.allocate(observation, None, scores, budget), budget, scores


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([-2.0, 0.0, 2.0]))
def test_the_plan_is_the_definition(make_prompts, whole, lengths, seed, share, similarity):
    observation, _ = make_prompts(seed, lengths, sink=1).left_padded(2)
    allocator = D2O(similarity=similarity)
    plan, budget, scores = planned(allocator, observation, seed, share)
    check_plan(plan, observation, budget, "d2o")
    spent = sum(layer.n_entries.sum(1) for layer in plan.layers)
    assert (budget - spent < observation.shape[2]).all()
    for index, (layer, seen) in enumerate(zip(plan.layers, observation.layers, strict=True)):
        entries = execute(layer, seen, observation.positions, observation.model.rope)
        assert entries.log_multiplicity.abs().max() == 0 if len(entries.keys) else True
        offset = 0
        for row in range(len(lengths)):
            for head in range(observation.shape[2]):
                body = observation.body[row].nonzero()[:, 0].tolist()
                count = int(layer.n_entries[row, head])
                kept = sorted(sorted(body, key=lambda t: (-float(scores[index, row, head, t]), t))[:count])
                gone = [t for t in body if t not in kept]
                keys, values = seen.keys[row, head].double(), seen.values[row, head].double()

                def cos(i, j, keys=keys):
                    return float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm())

                best = {i: max((cos(i, j), -j) for j in kept) for i in gone} if kept else {}
                mean = sum(b[0] for b in best.values()) / len(best) if best else 0.0
                for slot, j in enumerate(kept):
                    members = [i for i in best if -best[i][1] == j and best[i][0] >= mean + similarity]
                    if any(abs(best[i][0] - mean - similarity) < 1e-5 for i in best):
                        continue  # on the edge of the threshold, rounding decides
                    weights = [math.e, *(math.exp(best[i][0]) for i in members)]
                    wanted = sum(w * keys[t] for w, t in zip(weights, [j, *members], strict=True)) / sum(weights)
                    value = sum(w * values[t] for w, t in zip(weights, [j, *members], strict=True)) / sum(weights)
                    assert torch.allclose(entries.keys[offset + slot].double(), wanted, atol=1e-4)
                    assert torch.allclose(entries.values[offset + slot].double(), value, atol=1e-4)
                    assert int(entries.positions[offset + slot]) == int(observation.positions[row, j])
                offset += count


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(0, 99))
def test_a_row_is_the_same_whatever_the_padding(make_prompts, whole, lengths, seed):
    prompts = make_prompts(seed, lengths)
    for index, row in enumerate(prompts.rows):
        alone, (together, columns) = prompts.alone(index), prompts.left_padded(3)
        score = torch.rand(2, 1, 2, row.length, generator=torch.Generator().manual_seed(seed))
        wide = torch.zeros(together.shape)
        wide[:, index][..., columns[index]] = score[:, 0]
        units = 2 * 2 * torch.tensor([r.length for r in prompts.rows]) // 2
        mine = D2O().allocate(together, whole(together), wide, units)
        own = D2O().allocate(alone, whole(alone), score, units[index : index + 1])
        for a, b in zip(mine.layers, own.layers, strict=True):
            assert torch.equal(a.assignment[index][:, columns[index]], b.assignment[0])


def test_layers_with_spread_scores_get_more(make_prompts):
    observation, _ = make_prompts(0, [64], layers=2).left_padded()
    scores = torch.rand(observation.shape, generator=torch.Generator().manual_seed(0))
    scores[0] = scores[0] ** 30
    counts = D2O(layer_spread=1).layer_counts(scores, observation.body, torch.tensor([40]))
    assert counts.sum() == 40
    assert counts[0] < counts[1]
    even = D2O(layer_spread=0).layer_counts(scores, observation.body, torch.tensor([41]))
    assert even[:, 0].tolist() == [21, 20]


def test_the_threshold_decides_how_much_is_merged(make_prompts):
    observation, _ = make_prompts(0, [64]).left_padded()
    merged = [
        sum(int((layer.assignment >= 0).sum()) for layer in planned(D2O(similarity=s), observation, 0, 0.25)[0].layers)
        for s in (-2.0, 0.0, 2.0)
    ]
    assert merged[0] == 2 * 2 * 64
    assert merged[0] > merged[1] > merged[2] == pytest.approx(2 * 2 * 16, abs=4)
