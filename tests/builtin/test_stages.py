"""The stages of core."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import observation

import kvframe
from kvframe.budget import split_regions
from kvframe.builtin.allocators import KeepAll, TopK
from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.segmenters import Chunks, Whole
from kvframe.execute import check_plan, execute
from kvframe.spec import Protect
from kvframe.types import Entries, LayerPlan

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@given(LENGTHS, st.integers(1, 9))
def test_chunks_partition_each_row_from_its_first_token(lengths, size):
    seen = observation(lengths, layers=1)
    ids = Chunks(size=size).segment(seen).ids
    for row, length in enumerate(lengths):
        assert ids[row, -length:].tolist() == [t // size for t in range(length)]
    assert not Whole().segment(seen).ids.any()


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 100), st.integers(0, 10**6))
def test_top_k_keeps_the_best_of_each_head(lengths, budget, seed):
    seen = observation(lengths, seed=seed)
    scores = torch.rand(seen.shape, generator=torch.Generator().manual_seed(seed))
    limit = torch.full((len(lengths),), budget)
    plan = TopK().allocate(seen, Whole().segment(seen), scores, limit)
    check_plan(plan, seen, limit, "top_k")
    for index, layer in enumerate(plan.layers):
        for row, length in enumerate(lengths):
            for head in range(2):
                kept = (layer.assignment[row, head] >= 0).nonzero()[:, 0].tolist()
                best = scores[index, row, head, -length:].argsort(descending=True)[: budget // 4]
                assert kept == sorted((best + max(lengths) - length).tolist())


def test_keep_all_keeps_the_body():
    seen = observation([9, 4])
    regions = split_regions(seen.valid, Protect(sink=1, recent=2))
    seen = observation([9, 4], body=regions.body)
    plan = KeepAll().allocate(seen, Whole().segment(seen), torch.ones(seen.shape), torch.zeros(2))
    assert plan.layers[0].n_entries.tolist() == [[6, 6], [1, 1]]


def entries(dtype, scale, rows=13, dim=8):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(rows, dim, generator=generator) * scale).to(dtype) for _ in range(2)]
    return Entries(torch.tensor([0, 5, 5, rows]), *data, torch.rand(rows), torch.arange(rows).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 60.0, 1e4])
def test_int8_is_within_half_a_step(dtype, scale):
    before = entries(dtype, scale)
    after = Int8().decode(Int8().encode(before, ()), ())
    for name in ("keys", "values"):
        x, y = getattr(before, name).float(), getattr(after, name).float()
        largest = x.abs().amax(-1, keepdim=True)
        # Half a step; a bf16 scale may be 2^-8 too small for the largest; the result is rounded to the dtype.
        bound = largest / 127 * 0.5 * (1 + 2**-8) + largest * (2**-8 + torch.finfo(dtype).eps) + torch.finfo(dtype).tiny
        assert ((x - y).abs() <= bound).all()
        assert getattr(after, name).dtype == dtype
    assert torch.equal(after.log_multiplicity, before.log_multiplicity)
    assert torch.equal(after.positions, before.positions)


def test_int8_of_zeros_and_of_nothing():
    for rows in (0, 3):
        empty = Entries(torch.tensor([0, rows]), torch.zeros(rows, 8), torch.zeros(rows, 8))
        assert torch.equal(Int8().decode(Int8().encode(empty, ()), ()).keys, empty.keys)


@pytest.mark.parametrize("encoder", [Dense(), Int8()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bits_are_the_bytes_held(encoder, dtype):
    seen = observation([33], dtype=dtype)
    kept = seen.body[:, None].expand(seen.shape[1:])
    made = execute(LayerPlan.keep(kept), seen.layers[0], seen.positions, seen.model.rope)
    encoded = encoder.encode(Entries(made.offsets, made.keys, made.values), ())
    held = sum(t.untyped_storage().nbytes() for t in encoded.codes.values())
    assert held * 8 == encoder.bits_per_entry(seen.model, dtype.itemsize) * len(made.keys)


@pytest.mark.parametrize("name", ["identity", "int8"])
def test_a_pipeline_without_budget_keeps_every_token(name):
    seen = observation([30, 12])
    compressed = kvframe.load(name).run(seen, torch.zeros(2))
    assert compressed.parts[0][0].encoded.bounds == (0, 30, 60, 72, 84)
