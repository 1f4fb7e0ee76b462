"""The tolerances hold what rounding does, and not much more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.ops import ragged_attention
from kvframe.testing.numerics import attention_tolerance, logit_tolerance, sum_tolerance
from kvframe.types import Entries


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 10**6))
def test_sums_in_another_order(length, seed):
    terms = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    forward = backward = torch.zeros(())
    for term in terms[:300]:
        forward = forward + term
    for term in terms[:300].flip(0):
        backward = backward + term
    size = float(terms[:300].abs().sum())
    assert abs(float(forward - backward)) <= sum_tolerance(min(length, 300), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_attention(dtype, n, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(n, 16, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(1, 2, 3, 16, generator=generator).to(dtype)
    entries = Entries(torch.tensor([0, n]), keys, values, torch.rand(n, generator=generator))
    out, lse = ragged_attention(query, entries, 0.3)
    exact = ragged_attention(query.double(), entries, 0.3, impl="reference")
    limits = attention_tolerance(query, entries, 0.3)
    assert float((out - exact[0]).abs().max()) <= limits[0]
    assert float((lse - exact[1]).abs().max()) <= limits[1]
    # A scale that is a hundredth off must not pass in fp32.
    wrong = ragged_attention(query, entries, 0.303)
    if dtype == torch.float32 and n > 2:
        assert float((wrong[1] - exact[1]).abs().max()) > limits[1]


def test_logits():
    assert logit_tolerance(10.0, 10.0, 0.25, 16) == pytest.approx(25 * 18 * 2**-23)
