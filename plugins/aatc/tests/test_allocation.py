"""Water-filling: the relaxed solution's conditions, the discrete one against brute force, and exact sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import StageError
from kvframe_aatc.allocation import allocate, fill, high_rate, layer_targets, lower_hull, water_level

positive = st.floats(1e-6, 1e6)


@given(st.lists(positive, min_size=1, max_size=12), st.floats(0, 60))
def test_water_level(importance, budget):
    values = torch.tensor(importance, dtype=torch.float64)
    widths, level = water_level(values, budget)
    assert float(widths.sum()) == pytest.approx(budget, abs=1e-9)
    active = widths > 0
    weighted = values * 4.0**-widths
    assert torch.allclose(weighted[active], torch.full_like(weighted[active], level), rtol=1e-9)
    assert bool((values[~active] <= level * (1 + 1e-9)).all()), "who gets nothing lies below the level"
    assert water_level(values, budget + 1)[1] < level, "more bits, lower level"


def convex_curves(channels: int, most: int) -> st.SearchStrategy:
    """Decreasing convex distortions: sums of sorted nonnegative gains."""
    gains = st.lists(st.lists(st.floats(0, 1), min_size=most, max_size=most), min_size=channels, max_size=channels)
    return gains.map(_curves)


def _curves(gains: list[list[float]]) -> torch.Tensor:
    steps = torch.tensor([sorted(g, reverse=True) for g in gains], dtype=torch.float64)
    total = steps.sum(1, keepdim=True)
    return torch.cat([total, total - steps.cumsum(1)], 1)


@settings(max_examples=60, deadline=None)
@given(convex_curves(4, 3), st.lists(positive, min_size=4, max_size=4), st.integers(0, 12))
def test_the_greedy_is_as_good_as_trying_everything(curves, importance, budget):
    values = torch.tensor(importance, dtype=torch.float64)
    widths = fill(values, curves, budget)
    assert int(widths.sum()) == budget

    def cost(choice) -> float:
        return float(sum(values[c] * curves[c, w] for c, w in enumerate(choice)))

    best = min(cost(c) for c in itertools.product(range(4), repeat=4) if sum(c) == budget)
    assert cost(widths.tolist()) <= best + 1e-9 * (1 + float((values * curves[:, 0]).sum()))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_the_hull_is_convex_and_touches(values):
    curve = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    hull = lower_hull(curve)
    assert bool((hull <= curve + 1e-12).all())
    gains = hull[:-1] - hull[1:]
    assert bool((gains >= -1e-12).all())
    assert bool((gains[1:] <= gains[:-1] + 1e-9).all())
    assert hull[0] == curve[0]
    assert hull[-1] == curve[-1]


def test_a_bit_that_is_worth_little_is_skipped():
    # The paper's code: one bit is nearly worthless, so channels jump from none to two.
    hull = lower_hull(torch.tensor([1.0, 0.82, 0.21, 0.0515, 0.0128]))
    widths = fill(torch.ones(8), hull.expand(8, 5), 8)
    assert sorted(widths.tolist()) == [0, 0, 0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("scope", ["global", "layer", "group"])
@pytest.mark.parametrize("protected", [0, 1])
def test_all_bits_are_spent(scope, protected):
    generator = torch.Generator().manual_seed(0)
    layers, groups, channels = 3, 2, 8
    importance = torch.rand(layers, groups, channels, generator=generator) ** 4
    curves = high_rate(16).expand(layers, groups, 17)
    targets = layer_targets(2.5, 1.0, layers, protected, groups * channels, 0)
    assert sum(targets) == 2.5 * layers * groups * channels
    assert targets[:protected] == [3.5 * groups * channels] * protected
    widths = allocate(importance, curves, targets, scope, range(protected, layers))
    assert int(widths.sum()) == sum(targets)
    assert int(widths.min()) >= 0
    assert int(widths.max()) <= 16
    if scope != "global":
        assert [int(w) for w in widths.sum((1, 2))] == targets
    if scope == "group":
        assert len(set(widths[0].sum(1).tolist())) == 1


@pytest.mark.parametrize("mean", [2.0, 2.3, 1.917])
def test_scales_come_out_of_the_mean(mean):
    targets = layer_targets(mean, 0.0, 5, 0, 192, 16)
    assert sum(targets) + 16 * 5 <= mean * 192 * 5 < sum(targets) + 16 * 5 + 1


def test_means_that_cannot_be_met_are_refused():
    with pytest.raises(StageError, match=r"2 protected layers take 1\.5 bits"):
        layer_targets(0.5, 1.0, 3, 2, 64, 0)
    with pytest.raises(StageError, match=r"scales alone take 0\.25 bits"):
        layer_targets(0.1, 0.0, 1, 1, 64, 16)
    with pytest.raises(StageError, match="33 bits cannot be shared out over 2 channels of 0 to 16"):
        fill(torch.ones(2), high_rate(16).expand(2, 17), 33)


def test_a_layer_of_silent_channels_is_filled_all_the_same():
    widths = fill(torch.zeros(3), high_rate(4).expand(3, 5), 7)
    assert int(widths.sum()) == 7
