"""Rotation."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvframe.rope import Rope

INV_FREQ = 1.0 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)


@given(st.integers(0, 5000), st.floats(0.5, 2), st.sampled_from([16, 20]), st.integers(0, 10**6))
def test_unrotate_inverts_rotate(start, scaling, dim, seed):
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rope, positions = Rope(INV_FREQ, scaling), torch.arange(start, start + 5)
    assert torch.allclose(rope.unrotate(rope.rotate(x, positions), positions), x, atol=1e-12)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10**6))
def test_products_depend_on_the_distance_alone(distance, shift, seed):
    query, key = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rope = Rope(INV_FREQ)

    def product(at):
        return rope.rotate(query, torch.tensor([at + distance])) @ rope.rotate(key, torch.tensor([at])).mT

    # Angles are rounded to fp32, as models round them: 2000 rad * 2^-24 each.
    assert torch.allclose(product(0), product(shift), atol=16 * 4 * 2000 * 2.0**-23)


def test_positions_may_have_dimensions_that_the_keys_lack():
    x, positions = torch.randn(1, 2, 20), torch.tensor([[3, 9], [4, 5], [0, 1]])
    turned = Rope(INV_FREQ).rotate(x, positions)
    assert turned.shape == (3, 2, 20)
    assert torch.equal(turned[1], Rope(INV_FREQ).rotate(x[0], positions[1]))


def test_channels_beyond_the_rotated_ones_stay():
    x = torch.randn(1, 2, 20)
    assert torch.equal(Rope(INV_FREQ).rotate(x, torch.tensor([3, 9]))[..., 16:], x[..., 16:])
