"""Segment sums and selection."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvframe.ops import segment_pool, select_top


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6))
def test_segment_pool_is_a_loop(rows, segments, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    data, weights = torch.randn(rows, dim, generator=generator).double(), torch.rand(rows, generator=generator).double()
    segment = torch.randint(0, segments, (rows,), generator=generator)
    wanted = torch.zeros(segments, dim).double()
    for row in range(rows):
        wanted[segment[row]] += weights[row] * data[row]
    assert torch.allclose(segment_pool(data, weights, segment, segments), wanted, atol=1e-14)
    plain = segment_pool(data, torch.ones(rows), segment, segments)
    assert torch.equal(segment_pool(data, None, segment, segments), plain)


@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 10**6))
def test_select_top_is_a_sort(tokens, count, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (tokens,), generator=generator).float()  # many ties
    allowed = torch.rand(tokens, generator=generator) > 0.3
    order = sorted((t for t in range(tokens) if allowed[t]), key=lambda t: (-float(scores[t]), t))[:count]
    chosen = select_top(scores, torch.tensor(count), allowed)
    assert chosen.nonzero()[:, 0].tolist() == sorted(order)
