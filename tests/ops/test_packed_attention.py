"""Attention in code space: the reference against attention over rebuilt vectors, the others against the reference."""

from __future__ import annotations

import pytest
import torch

from kvframe.errors import InputError
from kvframe.ops import Packed, PackedRows, bitpack, lloyd_max, native, packed_attention
from kvframe.testing.numerics import cap_tolerance

# batch rows, groups, heads a group, queries a head, rows of each pair, widths of each group's keys and values, whether
# those are levels, 8-bit scales, log multiplicities
CASES = {
    "one group": (1, 1, 3, 1, [70], [[1, 2, 3, 2, 5, 9]], [[1, 2, 3, 4, 2]], False, True, False, False),
    "ragged": (2, 2, 1, 3, [0, 33, 600, 1], [[1, 2], [16, 3, 3]], [[4, 4, 6], [2]], False, True, True, True),
    "no channel": (1, 1, 1, 3, [5], [[]], [[]], False, True, False, False),
    "both levels": (1, 1, 3, 1, [300], [[3] * 20], [[2, 1, 7] + [1] * 16], True, True, False, True),
}

CAPS = (None, 1.5, 50.0)


def side(lengths, groups, widths, levels, bytewise, generator):
    """Random codes, and what they stand for times their scales, fp32 `[C, n]` of each pair."""
    words, segments, meant = [], [], {}
    for group in range(groups):
        wide = sorted(widths[group], reverse=True)
        segments.append(tuple((w, wide.count(w)) for w in sorted(set(wide), reverse=True)))
        for pair in range(group, len(lengths), groups):
            n, blocks = lengths[pair], -(-lengths[pair] // 32)
            planes, stand = [], []
            for width, count in segments[-1]:
                codes = torch.randint(0, 2**width, (count, blocks * 32), generator=generator)
                codes[:, n:] = 0
                planes.append(bitpack.pack(codes.int(), width, "reference").flatten(1))
                table = lloyd_max.normal_levels(width) if levels else torch.arange(2**width)
                stand.append(table[codes[:, :n]].float())
            words.append(torch.cat(planes, 1).flatten() if planes else torch.zeros(0, dtype=torch.int32))
            meant[pair] = torch.cat(stand) if stand else torch.zeros(0, n)
    rows = sum(lengths)
    table = torch.rand(groups, 256, generator=generator) if bytewise else None
    scales = torch.rand(rows, generator=generator).bfloat16()
    if bytewise:
        scales = torch.randint(0, 256, (rows,), generator=generator).to(torch.uint8)
    packed = Packed(torch.cat(words), scales, table, tuple(segments), levels)
    at = 0
    for group in range(groups):
        for pair in range(group, len(lengths), groups):
            meant[pair] = meant[pair] * packed.loaded(group, at, lengths[pair])
            at += lengths[pair]
    return packed, meant


def make(batch, groups, heads, each, lengths, key_widths, value_widths, key_levels, value_levels, bytewise, weighted):
    generator = torch.Generator().manual_seed(sum(lengths))
    keys, key_rows = side(lengths, groups, key_widths, key_levels, bytewise, generator)
    values, value_rows = side(lengths, groups, value_widths, value_levels, bytewise, generator)
    offsets = torch.tensor([0, *(n for n in lengths for _ in range(heads))]).cumsum(0)
    count = torch.rand(int(offsets[-1]), generator=generator) * 2 if weighted else None
    query = torch.randn(batch * groups, heads * each, keys.channels, generator=generator) / 10
    for group, wide in enumerate(key_widths):
        query[group::groups, :, len(wide) :] = 0
        query[group::groups] /= 2.0 ** (0 if key_levels else max(wide, default=0))
    constant = torch.randn(query.shape[:2], generator=generator) / 10
    rows = PackedRows(tuple(lengths), groups, heads, offsets, count)
    return (query, constant, keys, values, rows), key_rows, value_rows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_reference_is_attention_over_what_codes_stand_for(name, softcap):
    given, keys, values = make(*CASES[name])
    query, constant, packed_keys, _, rows = given
    shift = torch.linspace(-2, 2, constant.numel()).view(constant.shape)
    out, lse = packed_attention(*given, impl="reference", softcap=softcap, shift=shift)
    for pair, n in enumerate(rows.lengths):
        if n == 0:
            assert not out[pair].any()
            assert (lse[pair] == -torch.inf).all()
            continue
        group = pair % rows.groups
        first = sum(rows.lengths[p] for g in range(group) for p in range(g, len(rows.lengths), rows.groups))
        first += sum(rows.lengths[p] for p in range(group, pair, rows.groups))
        scale = packed_keys.loaded(group, first, n).double()
        logits = query[pair, :, : len(keys[pair])].double() @ keys[pair].double() + constant[pair, :, None] * scale
        logits = logits + shift[pair, :, None]
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        if rows.log_multiplicity is not None:
            per_head = len(query[pair]) // rows.heads
            for m in range(len(logits)):
                at = int(rows.offsets[pair * rows.heads + m // per_head])
                logits[m] += rows.log_multiplicity[at : at + n]
        assert torch.allclose(lse[pair].double(), logits.logsumexp(-1), atol=1e-5)
        wanted = logits.softmax(-1) @ values[pair].double().T
        limit = 1e-5 * (1 + float(values[pair].abs().max()) if values[pair].numel() else 1)
        assert torch.allclose(out[pair, :, : wanted.shape[1]].double(), wanted, atol=limit)


def agree(given, impl, device="cpu", softcap=None):
    """An implementation against the reference, within rounding of fp32 sums."""
    query, constant, keys, values, _ = given
    # What keys share: some queries' logits are far beyond the cap, some on its slope.
    shift = torch.linspace(-3, 3, constant.numel()).view(constant.shape) * (softcap or 1)
    terms = {"softcap": softcap, "shift": shift.to(device)}
    wanted_out, wanted_lse = packed_attention(*given, impl="reference", softcap=softcap, shift=shift)
    out, lse = (t.cpu() for t in packed_attention(*_moved(given, device), impl=impl, **terms))
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    eps = torch.finfo(torch.float32).eps
    logit = 16 * (keys.channels + 2) * eps  # the magnitudes of a product add up to less than 16, see below
    logit += eps * float(shift.abs().max()) + (0.0 if softcap is None else cap_tolerance(softcap))
    filled = wanted_lse.isfinite()
    assert ((lse - wanted_lse)[filled].abs() <= logit + eps * 16).all()
    largest = float(wanted_out.abs().max()) if wanted_out.numel() else 0.0
    widest = max((width for group in values.segments for width, _ in group), default=0)
    most = 4.0 if values.levels else 2.0**widest
    assert ((out - wanted_out).abs() <= max(largest, most) * (2 * logit + 8 * eps)).all()
    assert float(query.abs().sum(-1).max()) * (4 if keys.levels else 1) < 16


def _moved(given, device):
    query, constant, keys, values, rows = given
    sides = [
        Packed(
            s.words.to(device),
            s.scales.to(device),
            None if s.scale_table is None else s.scale_table.to(device),
            s.segments,
            s.levels,
        )
        for s in (keys, values)
    ]
    count = None if rows.log_multiplicity is None else rows.log_multiplicity.to(device)
    moved = PackedRows(rows.lengths, rows.groups, rows.heads, rows.offsets.to(device), count)
    return query.to(device), constant.to(device), *sides, moved


@pytest.mark.skipif(not native.available(), reason="needs numba")
def test_the_cpu_kernel_matches_the_reference(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        for case in CASES.values():
            for softcap in CAPS:
                agree(make(*case)[0], "cpu", softcap=softcap)
    finally:
        torch.use_deterministic_algorithms(False)


def test_refusals_name_the_way_out():
    (query, constant, keys, values, rows), _, _ = make(*CASES["one group"])
    with pytest.raises(InputError, match="no implementation 'cuda'; there are: auto, reference, cpu, triton"):
        packed_attention(query, constant, keys, values, rows, "cuda")
    with pytest.raises(InputError, match=r"queries in fp32, not torch.bfloat16; call \.float\(\)"):
        packed_attention(query.bfloat16(), constant, keys, values, rows)
    strided = Packed(keys.words.repeat_interleave(2)[::2], *(keys.scales, None, keys.segments, keys.levels))
    with pytest.raises(InputError, match="those of the keys are not"):
        packed_attention(query, constant, strided, values, rows)
    short = Packed(keys.words[:-1], keys.scales, None, keys.segments, keys.levels)
    for given in ((query, constant, short, values), (query[..., 1:], constant, keys, values)):
        with pytest.raises(InputError, match=r"channels of queries for 6, and \d+ words"):
            packed_attention(*given, rows)
