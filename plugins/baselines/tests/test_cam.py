"""CaM with one target against loops, and what it leaves of the full output."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.execute import check_plan, execute
from kvframe_baselines import CaM

LENGTHS = st.lists(st.sampled_from([1, 2, 7, 33]), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_the_plan_is_the_definition(make_prompts, lengths, seed, share):
    observation, _ = make_prompts(seed, lengths, sink=1).left_padded(2)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.where(observation.body[:, None], torch.rand(observation.shape, generator=generator), 0)
    scores[:, 0] *= torch.rand(scores[:, 0].shape, generator=generator) > 0.3
    units = observation.shape[0] * observation.shape[2]
    budget = (units * observation.body.sum(1) * share).long()
    plan = CaM().allocate(observation, None, scores, budget)
    check_plan(plan, observation, budget, "cam")
    for index, (layer, seen) in enumerate(zip(plan.layers, observation.layers, strict=True)):
        entries = execute(layer, seen, observation.positions, observation.model.rope)
        offset = 0
        for row in range(len(lengths)):
            for head in range(observation.shape[2]):
                score, values = scores[index, row, head], seen.values[row, head].double()
                body = observation.body[row].nonzero()[:, 0].tolist()
                best = sorted(body, key=lambda t, score=score: (-float(score[t]), t))
                kept = sorted(best[: int(budget[row]) // units])
                assert int(layer.n_entries[row, head]) == len(kept)
                before = -1
                for j in kept:
                    shares = {
                        i: min(1.0, float(score[i]) / max(float(score[j]), 1e-38)) for i in body if before < i < j
                    }
                    wanted = values[j] + sum(p * values[i] for i, p in shares.items())
                    count = entries.log_multiplicity[offset].double().exp()
                    assert float(count) == pytest.approx(1 + sum(shares.values()), rel=1e-5)
                    assert torch.allclose(entries.values[offset].double() * count, wanted, rtol=1e-5, atol=1e-4)
                    assert torch.equal(entries.keys[offset], seen.keys[row, head, j])
                    assert int(entries.positions[offset]) == int(observation.positions[row, j])
                    offset, before = offset + 1, j
