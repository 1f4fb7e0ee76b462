"""Curvature, and slots by dynamic programming, against loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvframe.errors import StageError
from kvframe_gracekv import Curvature
from kvframe_gracekv.curvature import curvature, directions, robust_z
from kvframe_gracekv.slots import SlotRule, best_slots, dispersion

SMALL = Curvature(shortest=2, preferred_length=4, longest=7, scales=(1, 2))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 7, 33]), st.integers(0, 10**6))
def test_curvature_is_the_definition(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    states = [directions(torch.randn(tokens, 5, generator=generator)) for _ in range(2)]
    got = curvature(states, (1, 3), 0.25)
    for i in range(tokens):
        values = []
        for h in states:
            for w in (1, 3):
                value = 0.0
                if w <= i < tokens - w:
                    h64 = h.double()
                    before, after = h64[i - w + 1 : i + 1].mean(0), h64[i + 1 : i + w + 1].mean(0)
                    one, two = h64[i] - before, after - h64[i]
                    value = 1 - float(one @ two) / (max(float(one.norm()), 1e-6) * max(float(two.norm()), 1e-6))
                values.append(value)
        mean = sum(values) / 4
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
        assert float(got[i]) == pytest.approx(mean - 0.25 * spread, abs=1e-4)


def test_robust_z_of_a_constant_is_zero():
    assert robust_z(torch.full((9,), 3.0)).abs().max() == 0


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 7, 15]), st.integers(1, 9), st.integers(0, 10**6))
def test_dispersion_is_a_variance(tokens, longest, seed):
    h = directions(torch.randn(tokens, 4, generator=torch.Generator().manual_seed(seed)))
    got = dispersion([h], longest)
    for length in range(1, min(longest, tokens) + 1):
        for begin in range(tokens - length + 1):
            steps = h[begin : begin + length].double().diff(dim=0)
            wanted = 0.0 if len(steps) < 2 else float((steps - steps.mean(0)).square().sum() / (len(steps) - 1))
            assert float(got[length - 1, begin]) == pytest.approx(wanted, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 4), st.integers(0, 10**6))
def test_slots_beat_every_other_partition(tokens, shortest, more, seed):
    generator = torch.Generator().manual_seed(seed)
    h = directions(torch.randn(tokens, 4, generator=generator))
    boundary = torch.randn(tokens, generator=generator)
    rule = SlotRule(shortest, 3, shortest + more, 0.25, 0.1, 0.3)
    spread = dispersion([h], tokens)

    def total(firsts):
        score = 0.0
        for begin, end in zip(firsts, [*firsts[1:], tokens], strict=True):
            n = end - begin
            score -= 0.25 * float(spread[n - 1, begin]) + 0.1 * ((n - 3) / 3) ** 2
            score += float(boundary[begin]) - 0.3 if begin else 0
        return score

    def partitions(begin, relaxed):
        low = 1 if relaxed else shortest
        for end in range(begin + 1, tokens + 1):
            n = end - begin
            if n <= shortest + more and (n >= shortest or (end == tokens and n >= low)):
                if end == tokens:
                    yield [begin]
                else:
                    yield from ([begin, *rest] for rest in partitions(end, relaxed))

    got = best_slots([h], boundary, rule)
    if tokens <= shortest:
        assert got == [0]
        return
    allowed = list(partitions(0, False)) or list(partitions(0, True))
    assert got in allowed
    assert total(got) == pytest.approx(max(map(total, allowed)), abs=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 7, 33]), min_size=1, max_size=3), st.integers(0, 99), st.integers(0, 4))
def test_a_row_alone_has_the_same_slots(make, lengths, seed, extra):
    together = make(lengths, seed=seed, sink=1, recent=2, extra=extra)
    segments = SMALL.segment(together)
    for row, n in enumerate(lengths):
        alone = SMALL.segment(make(lengths, seed=seed, sink=1, recent=2, only=row))
        assert torch.equal(segments.ids[row, -n:] - segments.ids[row, -n], alone.ids[0] - alone.ids[0, 0])
        assert torch.allclose(segments.boundary[row, -n:], alone.boundary[0], atol=1e-5)


def test_slots_keep_their_lengths_and_leave_the_protected_alone(make):
    seen = make([80], sink=3, recent=5)
    ids = SMALL.segment(seen).ids[0]
    body = torch.unique_consecutive(ids[3:75], return_counts=True)[1]
    assert ((body >= 2) & (body <= 7)).all()
    assert ids[2] < ids[3]
    assert ids[74] < ids[75]
    assert len(ids[75:].unique()) == 1


def test_constant_hidden_states_still_give_slots(make):
    seen = make([90])
    flat = {depth: torch.ones_like(states) for depth, states in seen.hidden_states.items()}
    segments = Curvature(longest=40, preferred_length=30).segment(replace(seen, hidden_states=flat))
    lengths = torch.unique_consecutive(segments.ids[0], return_counts=True)[1]
    assert ((lengths >= 16) & (lengths <= 40)).all()
    assert segments.boundary.isfinite().all()


def test_bad_input_is_one_sentence(make):
    seen = make([9])
    broken = seen.surprisal.clone()
    broken[0, 4] = torch.nan
    with pytest.raises(StageError, match=r"surprisal that is not finite in row 0.*surprisal_weight: 0"):
        SMALL.segment(replace(seen, surprisal=broken))
    with pytest.raises(StageError, match=r"needs surprisal.*surprisal_weight: 0"):
        SMALL.segment(replace(seen, surprisal=None))
    with pytest.raises(StageError, match=r"hidden states at depth 0\.33"):
        SMALL.segment(replace(seen, hidden_states={}))
    with pytest.raises(ValidationError, match="must not exceed longest"):
        Curvature(shortest=20, longest=10)
