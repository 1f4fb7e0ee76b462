"""The CPU's own kernel for ragged attention: against the reference in fp64, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_ragged_attention_triton import LOGITS, check

from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.kernels import Auto, Cpu, Sdpa
from kvframe.errors import InputError
from kvframe.ops import native
from kvframe.ops.ragged_attention.plan import work_items
from kvframe.testing.numerics import cap_tolerance
from kvframe.types import Encoded, Entries, Part

needs_numba = pytest.mark.skipif(not native.available(), reason="needs numba")

# batch, KV heads, group, queries, D, longest head, weighted. D of 64 and more have a kernel of their own.
SHAPES = [
    (1, 1, 1, 1, 24, 1, False),
    (2, 3, 3, 1, 24, 700, True),
    (3, 2, 2, 5, 24, 9, True),
    (2, 1, 1, 3, 24, 0, False),
    (1, 2, 4, 20, 40, 2000, False),
]


@needs_numba
@pytest.mark.parametrize(
    ("dtype", "encoder"),
    [(torch.float32, Dense()), (torch.bfloat16, Dense()), (torch.float16, Dense()), (torch.bfloat16, Int8())],
    ids=str,
)
def test_the_kernel_matches_the_reference(dtype, encoder, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        for shape in [*SHAPES, (2, 3, 3, 1, 64, 333, True)]:
            for scale, softcap in LOGITS:
                check(shape, encoder, dtype, kernel=Cpu(), scale=scale, softcap=softcap)
    finally:
        torch.use_deterministic_algorithms(False)


@needs_numba
@pytest.mark.parametrize("dim", [16, 64])
def test_every_half_is_read_as_torch_reads_it(dim):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = every[every.isfinite()].view(-1, dim)
    # A head for each row of values: its output is that row.
    heads = len(values)
    entries = Entries(torch.arange(heads + 1), torch.zeros_like(values), values)
    part = Part(Dense().encode(entries, ()), Dense())
    out, _ = Cpu().attend(torch.zeros(1, heads, 1, dim, dtype=torch.float16), part, 1.0)
    assert torch.equal(out[0, :, 0], values.float())


def test_items_cover_every_entry_once_and_are_alike():
    for bounds in [(0, 0), (0, 1), (0, 5000, 5000, 5001, 9000), (0, 100000)]:
        items, first = work_items(bounds, 2, 64)
        covered = torch.zeros(bounds[-1], dtype=torch.int64)
        for pair, begin, end in items.tolist():
            assert bounds[pair] <= begin < end <= bounds[pair + 1]
            covered[begin:end] += 1
        assert (covered == 1).all()
        counts = [sum(1 for item in items.tolist() if item[0] == pair) for pair in range(len(bounds) - 1)]
        assert first.diff().tolist() == counts
        # One thread ends at most one piece after the other.
        assert max((end - begin for _, begin, end in items.tolist()), default=0) <= max(256, bounds[-1] // 8 + 64)


@needs_numba
def test_multiplicities_are_read_whatever_their_type_and_layout():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(9, 24, generator=generator) for _ in range(2))
    count = torch.rand(9, generator=generator)
    query = torch.randn(1, 2, 1, 24, generator=generator)
    outs = []
    for given in (count, count.double(), count.repeat_interleave(2)[::2]):
        part = Part(Dense().encode(Entries(torch.tensor([0, 9]), keys, values, given), ()), Dense())
        outs.append(Cpu().attend(query, part, 1.0)[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@needs_numba
def test_refusals_name_the_way_out():
    entries = Entries(torch.tensor([0, 3]), torch.randn(3, 24), torch.randn(3, 24))
    codes, query = Dense().encode(entries, ()), torch.randn(1, 1, 1, 24)
    foreign = Encoded(codes.offsets, codes.codes, "mine", codes.dtype)
    with pytest.raises(InputError, match=r"no loader for the format 'mine' .*use attention: auto"):
        Cpu().attend(query, Part(foreign, Dense()), 1.0)
    strided = Encoded(codes.offsets, {**codes.codes, "keys": torch.zeros(24, 3).T}, "dense", codes.dtype)
    with pytest.raises(InputError, match=r"'keys' is not; call \.contiguous\(\)"):
        Cpu().attend(query, Part(strided, Dense()), 1.0)
    with pytest.raises(InputError, match=r"fp32, bf16 or fp16, not torch.float64; use attention: auto"):
        Cpu().attend(query.double(), Part(codes, Dense()), 1.0)
    with pytest.raises(InputError, match=r"keys and values alike, \[N, 16\], but they are torch.float32 \[3, 24\]"):
        Cpu().attend(query[..., :16], Part(codes, Dense()), 1.0)
    with pytest.raises(InputError, match="runs on the CPU, but the query is on meta"):
        Cpu().attend(query.to("meta"), Part(codes, Dense()), 1.0)


def test_an_encoder_without_a_way_of_its_own_is_named():
    class Plain(Dense):
        def attend(self, query, encoded, state, scale, impl):
            return None

    entries = Entries(torch.tensor([0, 3]), torch.randn(3, 24), torch.randn(3, 24))
    part = Part(Dense().encode(entries, ()), Plain())
    query = torch.randn(1, 1, 1, 24)
    if native.available():
        with pytest.raises(InputError, match=r"no loader for the format 'dense' of the encoder 'dense'; use attention"):
            Cpu().attend(query, part, 1.0)
    assert torch.equal(Auto().attend(query, part, 1.0)[0], Sdpa().attend(query, part, 1.0)[0])


def test_without_numba_it_is_said_once(monkeypatch, caplog):
    native._usable.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    big = Entries(torch.tensor([0, 5000]), torch.randn(5000, 24), torch.randn(5000, 24))
    part, query = Part(Dense().encode(big, ()), Dense()), torch.randn(1, 1, 1, 24)
    try:
        for _ in range(2):
            assert torch.equal(Auto().attend(query, part, 1.0)[0], Sdpa().attend(query, part, 1.0)[0])
        assert caplog.text.count("pip install 'kvframe[cpu]'") == 1
        with pytest.raises(InputError, match=r"needs the package 'numba'.*kvframe\[cpu\].*attention: auto"):
            Cpu().attend(query, part, 1.0)
    finally:
        native._usable.cache_clear()


@needs_numba
def test_auto_decodes_what_the_kernel_refuses(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(24, 5000, generator=generator).T for _ in range(2))
    query = torch.randn(1, 1, 1, 24, generator=generator)
    entries = Entries(torch.tensor([0, 5000]), keys, values)
    strided = Part(Dense().encode(entries, ()), Dense())
    dense = Part(Dense().encode(replace(entries, keys=keys.contiguous(), values=values.contiguous()), ()), Dense())
    wanted = Cpu().attend(query, dense, 0.3)
    for got, expected in zip(Auto().attend(query, strided, 0.3), wanted, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


def test_an_encoder_that_cannot_cap_is_decoded_or_named():
    class Plain(Dense):
        def attend(self, query, encoded, state, scale, impl):
            raise AssertionError("called for a model with a cap")

    entries = Entries(torch.tensor([0, 2000]), torch.randn(2000, 24), torch.randn(2000, 24))
    part, query = Part(Dense().encode(entries, ()), Plain()), torch.randn(1, 1, 1, 24)
    for got, wanted in zip(
        Auto().attend(query, part, 1.0, softcap=2.0), Sdpa().attend(query, part, 1.0, softcap=2.0), strict=True
    ):
        assert torch.equal(got, wanted)
    if native.available():
        with pytest.raises(InputError, match=r"'dense' attends its codes without a cap on logits.*use attention: auto"):
            Cpu().attend(query, part, 1.0, softcap=2.0)


@needs_numba
def test_the_tangent_is_within_what_tolerances_take_it_for():
    """A head of one entry, whose key is 1: its log-sum-exp is the capped query."""
    logits = torch.cat([torch.logspace(-20, 38, 2001), torch.linspace(0, 40, 4001)])
    logits = torch.cat([logits, -logits, torch.zeros(1)])
    one = torch.zeros(1, 24)
    one[0, 0] = 1
    entries = Entries(torch.arange(2), one, one)
    query = torch.zeros(1, len(logits), 1, 24)
    query[0, :, 0, 0] = logits
    part = Part(Dense().encode(entries, ()), Dense())
    for softcap in (0.1, 1.5, 50.0):
        _, lse = Cpu().attend(query, part, 1.0, softcap=softcap)
        wanted = softcap * (logits.double() / softcap).tanh()
        assert float((lse[0, :, 0] - wanted).abs().max()) <= cap_tolerance(softcap)
