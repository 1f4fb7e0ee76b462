"""Ragged attention: every implementation against fp64, and the laws of attention over parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import InputError
from kvframe.ops import attention_weights, dense_attention, merge_attention, merge_sinks, ragged_attention
from kvframe.types import Entries

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "length": st.integers(1, 5),
        "dim": st.sampled_from([8, 16, 24]),
        "seed": st.integers(0, 10**6),
        "uniform": st.booleans(),
        "weighted": st.booleans(),
    }
)


def make(batch, heads, group, length, dim, seed, uniform, weighted, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    if uniform:
        counts = torch.full((batch * heads,), int(torch.randint(0, 9, (), generator=generator)))
    else:
        counts = torch.randint(0, 9, (batch * heads,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    total = int(offsets[-1])
    keys, values = (torch.randn(total, dim, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    log_multiplicity = torch.rand(total, generator=generator) * 3 if weighted else None
    query = torch.randn(batch, heads * group, length, dim, generator=generator, dtype=torch.float64).to(dtype)
    return query, Entries(offsets, keys, values, log_multiplicity)


def spelled_out(query, entries, scale, softcap=None, sinks=None):
    """Attention written with loops over everything, in fp64."""
    batch, query_heads, length, dim = query.shape
    heads = (len(entries.offsets) - 1) // batch
    out = torch.zeros(batch, query_heads, length, dim, dtype=torch.float64)
    lse = torch.full((batch, query_heads, length), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            pair = b * heads + h // (query_heads // heads)
            rows = range(int(entries.offsets[pair]), int(entries.offsets[pair + 1]))
            for t in range(length):
                weights = []
                for r in rows:
                    bias = 0.0 if entries.log_multiplicity is None else float(entries.log_multiplicity[r])
                    logit = query[b, h, t].double() @ entries.keys[r].double() * scale
                    logit = logit if softcap is None else softcap * torch.tanh(logit / softcap)
                    weights.append(torch.exp(logit + bias))
                if weights or sinks is not None:
                    total = sum(weights) + (0 if sinks is None else torch.exp(sinks[h].double()))
                    lse[b, h, t] = total.log()
                    out[b, h, t] = (
                        sum(w * entries.values[r].double() for w, r in zip(weights, rows, strict=True)) / total
                    )
    return out, lse


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([None, 1.5, 50.0]))
def test_reference_is_attention(shape, softcap):
    query, entries = make(**shape)
    scale = 0.3 if softcap is None else softcap  # logits of several times the cap
    got = ragged_attention(query, entries, scale, "reference", softcap)
    for mine, wanted in zip(got, spelled_out(query, entries, scale, softcap), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([None, 1.5]))
def test_sinks_are_a_part_without_values(shape, softcap):
    """Heads with nothing kept included: their whole attention is the sink's."""
    query, entries = make(**shape)
    sinks = torch.linspace(-30, 30, query.shape[1])
    got = merge_sinks(ragged_attention(query, entries, 0.3, "reference", softcap), sinks)
    for mine, wanted in zip(got, spelled_out(query, entries, 0.3, softcap, sinks), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, torch.tensor([-3.0, 0.5, 40.0])])
def test_weights_with_a_sink_leave_it_its_share(sinks):
    logits = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[..., 4:] = -torch.inf
    weights = attention_weights(logits, None if sinks is None else sinks[:, None])
    terms = logits if sinks is None else torch.cat([logits, sinks[:, None, None].expand(2, 3, 5, 1)], -1)
    assert torch.allclose(weights, terms.softmax(-1)[..., :7], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, softcap=st.sampled_from([None, 1.5, 50.0]))
def test_sdpa_matches_the_reference(dtype, shape, softcap):
    query, entries = make(**shape, dtype=dtype)
    scale = 0.3 if softcap is None else softcap / 8
    wanted_out, wanted_lse = ragged_attention(query, entries, scale, "reference", softcap)
    out, lse = ragged_attention(query, entries, scale, "sdpa", softcap)
    assert out.dtype == lse.dtype == torch.float32
    # The fused kernel rounds weights and output to the dtype; values are below 5, logits below 50.
    eps = max(torch.finfo(dtype).eps, 2e-6)
    assert torch.allclose(out, wanted_out, atol=8 * eps, rtol=2 * eps)
    assert torch.allclose(lse, wanted_lse, atol=1e-4, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_multiplicity_k_is_k_copies(shape):
    query, entries = make(**{**shape, "weighted": False})
    copies = 3
    counted = Entries(
        entries.offsets, entries.keys, entries.values, torch.full((len(entries.keys),), copies).double().log()
    )
    repeated = Entries(
        entries.offsets * copies, entries.keys.repeat_interleave(copies, 0), entries.values.repeat_interleave(copies, 0)
    )
    for impl, tolerance in (("reference", 1e-12),):
        for a, b in zip(
            ragged_attention(query, counted, 0.3, impl), ragged_attention(query, repeated, 0.3, impl), strict=True
        ):
            assert torch.allclose(a, b, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(0, 8))
def test_split_then_merge_is_the_whole(shape, cut):
    query, entries = make(**shape)
    parts = []
    for side in range(2):
        rows, counts = [], []
        for begin, end in zip(entries.bounds, entries.bounds[1:], strict=False):
            middle = min(begin + cut, end)
            chosen = range(begin, middle) if side == 0 else range(middle, end)
            rows += chosen
            counts.append(len(chosen))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor(counts).cumsum(0)])
        log_multiplicity = None if entries.log_multiplicity is None else entries.log_multiplicity[rows]
        parts.append(
            ragged_attention(
                query, Entries(offsets, entries.keys[rows], entries.values[rows], log_multiplicity), 0.3, "reference"
            )
        )
    whole = ragged_attention(query, entries, 0.3, "reference")
    for merged, wanted in zip(merge_attention(parts), whole, strict=True):
        assert torch.allclose(merged, wanted, atol=1e-12)


@pytest.mark.parametrize("block", [1 << 24, 64])
def test_dense_attention_with_a_mask(block, monkeypatch):
    import importlib

    dense = importlib.import_module("kvframe.ops.ragged_attention.dense")
    monkeypatch.setattr(dense, "BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    # Keys of another precision than the query's go the way of devices without a fused kernel.
    keys, values = (torch.randn(2, 2, 9, 8, generator=generator).double() for _ in range(2))
    mask = torch.rand(2, 1, 5, 9, generator=generator) > 0.4
    mask[1, 0, 3] = False  # this query sees nothing
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out, lse = dense_attention(query, keys, values, 0.3, bias)
    keys, values = keys.float(), values.float()
    logits = query.view(2, 2, 3, 5, 8) @ keys[:, :, None].mT * 0.3 + bias[:, :, None]
    assert torch.allclose(lse, logits.logsumexp(-1).view(2, 6, 5), atol=1e-5)
    wanted = (logits.softmax(-1).nan_to_num(0) @ values[:, :, None]).view(2, 6, 5, 8)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert out[1, :, 3].abs().max() == 0


def test_an_unknown_implementation_is_named():
    with pytest.raises(InputError, match="no implementation 'cuda'; there are: auto, reference, sdpa"):
        ragged_attention(
            torch.zeros(1, 1, 1, 8), Entries(torch.tensor([0, 0]), torch.zeros(0, 8), torch.zeros(0, 8)), 1.0, "cuda"
        )


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_the_layout_in_memory_does_not_matter(impl):
    query, entries = make(2, 2, 2, 1, 16, 3, False, False, torch.float32)
    columns = Entries(entries.offsets, entries.keys.T.contiguous().T, entries.values.T.contiguous().T)
    assert columns.keys.stride(-1) > 1
    for got, wanted in zip(
        ragged_attention(query, columns, 0.3, impl), ragged_attention(query, entries, 0.3, impl), strict=True
    ):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "query_heads", "heads", "queries", "n"), [(2, 6, 2, 7, 33), (1, 4, 4, 2, 1)])
def test_many_queries_under_a_bias(dtype, batch, query_heads, heads, queries, n):
    """Masks that differ from query to query, some of which see nothing, for every shape that a bias may have."""
    generator = torch.Generator().manual_seed(n)
    query, keys, values = (
        torch.randn(batch, h, t, 16, generator=generator).to(dtype)
        for h, t in ((query_heads, queries), (heads, n), (heads, n))
    )
    for shape in ((batch, 1, queries, n), (1, 1, queries, n), (batch, heads, queries, n), (batch, 1, 1, n)):
        bias = torch.randn(shape, generator=generator)
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.4, -torch.inf)
        bias[..., 0, :] = -torch.inf
        out, lse = dense_attention(query, keys, values, 0.3, bias)
        grouped = query.double().reshape(batch, heads, -1, queries, 16)
        logits = grouped @ keys.double()[:, :, None].transpose(-1, -2) * 0.3 + bias.double()[:, :, None]
        wanted_lse = logits.logsumexp(-1)
        weights = (logits - wanted_lse.nan_to_num(neginf=0.0)[..., None]).exp()
        wanted = (weights @ values.double()[:, :, None]).reshape(out.shape)
        # The products are rounded to the dtype once, as are the weights; sums are fp32.
        limit = 8 * torch.finfo(dtype).eps
        assert torch.allclose(out.double(), wanted, atol=limit * float(values.abs().max()))
        assert torch.allclose(lse.double(), wanted_lse.reshape(lse.shape), atol=limit * 8)
