"""The interval tables: every implementation against fp64 written out, and what the numbers mean."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import InputError
from kvframe.ops import gram_band, interval_distortion, interval_sums
from kvframe.rope import Rope

SHAPES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "units": st.sampled_from([1, 3]),
        "tokens": st.sampled_from([1, 2, 7, 33]),
        "probes": st.sampled_from([1, 2, 5]),
        "dim": st.sampled_from([4, 8]),
        "rotary": st.sampled_from([4, 2]),
        "scaling": st.sampled_from([1.0, 1.25]),
        "sink": st.booleans(),
        "longest": st.sampled_from([1, 2, 5, 40]),
    }
)


def make(seed, units, tokens, probes, dim, rotary, scaling, sink, longest, dtype=torch.float32):
    """Heads with centred keys that differ in size; with `sink` the first token draws nearly all attention."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    rope = Rope(100.0 ** (-torch.arange(0, rotary, 2) / rotary), scaling)
    keys = rope.rotate(draw(units, 1, dim) * 2 + draw(units, tokens, dim), torch.arange(tokens))
    values, queries = draw(units, tokens, dim) + draw(units, 1, dim), draw(units, probes, dim)
    if sink:
        keys[:, 0] = queries.mean(1) * 8
        values[:, 0] *= 0.01
    weights = torch.rand(units, tokens, generator=generator) ** 4
    weights[0, : tokens // 2] = 0
    tensors = [x.to(dtype) for x in (keys, values, queries)]
    return (*tensors, weights, rope, dim**-0.5, longest)


def spelled_out(keys, values, probes, weights, rope, scale, begin, end, unit):
    """Distortion and multiplicity of one interval of one unit, with loops, in fp64."""
    index = torch.arange(len(keys[unit]))
    k, v, q, w = (x[unit].double() for x in (keys, values, probes, weights))
    plain = torch.stack([rope.unrotate(k[t : t + 1], index[t : t + 1])[0] for t in range(len(k))])
    inside = range(begin, end)
    n = end - begin
    mean = sum(plain[t] for t in inside) / n
    coherence = float(mean.norm() / (sum(plain[t].norm() for t in inside) / n))
    multiplicity = min(max(n * coherence**2, 1.0), n)
    at = torch.tensor([(begin + end - 1) // 2])
    key = rope.rotate(mean[None], at)[0]
    base = 0.1 * sum(float(w[t]) for t in inside) / n
    total_weight = sum(float(w[t]) + base for t in inside)
    value = sum((float(w[t]) + base) * v[t] for t in inside) / total_weight if total_weight else v[begin:end].mean(0)
    lost = 0.0
    for one in q:
        logits = torch.stack([one @ key_t for key_t in k]) * scale
        e = (logits - logits.max()).exp()
        everything = e.sum()
        z = sum(e[t] for t in inside)
        m = sum(e[t] * v[t] for t in inside)
        z_ours = multiplicity * (one @ key * scale - logits.max()).exp()
        m_ours = z_ours * value
        d = 0.25 * (z - z_ours) ** 2 / z**2 + 0.75 * (m - m_ours).square().sum() / m.square().sum()
        lost += float(z / everything * d) / len(q)
    return (0.0 if n == 1 else lost), multiplicity


@settings(max_examples=25, deadline=None)
@given(SHAPES)
def test_reference_is_the_definition(shape):
    args = make(**shape)
    tables = interval_distortion(*args, impl="reference")
    units, longest, tokens = tables.distortion.shape
    generator = torch.Generator().manual_seed(shape["seed"])
    for _ in range(6):
        unit, length = (int(torch.randint(0, high, (), generator=generator)) for high in (units, longest))
        begin = int(torch.randint(0, tokens - length, (), generator=generator))
        lost, multiplicity = spelled_out(*args[:-1], begin, begin + length + 1, unit)
        assert float(tables.distortion[unit, length, begin]) == pytest.approx(lost, rel=1e-9, abs=1e-12)
        assert float(tables.multiplicity[unit, length, begin]) == pytest.approx(multiplicity, rel=1e-9)


@pytest.mark.parametrize("impl", ["fast", "numba"])
@pytest.mark.parametrize(("dtype", "coherent"), [(torch.float32, True), (torch.bfloat16, False)])
@settings(max_examples=15, deadline=None)
@given(shape=SHAPES)
def test_implementations_match_the_reference(dtype, coherent, impl, shape):
    if impl == "numba":
        pytest.importorskip("numba")
    args = make(**shape, dtype=dtype)
    wanted = interval_distortion(*args, coherent=coherent, impl="reference")
    got = interval_distortion(*args, coherent=coherent, impl=impl)
    assert got.distortion.dtype == torch.float32
    possible = wanted.distortion.isfinite()
    assert torch.equal(got.distortion.isfinite(), possible)
    # Distortions are shares of the attention, so 1e-5 is absolute; one that exceeds 1 is held relative to itself.
    close = {"atol": 1e-5, "rtol": 1e-4}
    assert torch.allclose(got.distortion[possible].double(), wanted.distortion[possible], **close)
    assert torch.allclose(got.multiplicity.double(), wanted.multiplicity, atol=1e-4, rtol=1e-4)
    assert torch.allclose(got.mass.double(), wanted.mass, atol=1e-6)
    assert (got.distortion >= 0).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_identical_tokens_merge_without_error(seed, copies):
    generator = torch.Generator().manual_seed(seed)
    rope = Rope(torch.zeros(2))  # without a rotation, equal tokens stay equal
    keys, values = (torch.randn(1, 1, 4, generator=generator).expand(1, copies, 4) for _ in range(2))
    probes = torch.randn(1, 3, 4, generator=generator)
    tables = interval_distortion(keys, values, probes, torch.rand(1, copies, generator=generator), rope, 0.5, copies)
    possible = tables.distortion.isfinite()
    # A difference of squares rounds at a few units in the last place of 1.
    assert tables.distortion[possible].abs().max() < 8 * torch.finfo(torch.float32).eps
    lengths = torch.arange(1.0, copies + 1)[:, None].expand(copies, copies)
    assert torch.allclose(tables.multiplicity[possible], lengths[None][possible], rtol=1e-5)


@pytest.mark.parametrize(("impl", "limit", "small"), [("fast", "CPU_BLOCK", 1), ("numba", "BLOCK", 4)])
def test_chunks_change_nothing(monkeypatch, impl, limit, small):
    module = pytest.importorskip(f"kvframe.ops.interval_distortion.{impl}", exc_type=ImportError)
    args = make(1, 3, 33, 5, 8, 4, 1.25, True, 7)
    whole = interval_distortion(*args, impl=impl)
    monkeypatch.setattr(module, limit, small)
    assert torch.allclose(interval_distortion(*args, impl=impl).distortion, whole.distortion, atol=1e-6)


def test_threads_change_nothing():
    pytest.importorskip("numba")
    args, before = make(1, 3, 33, 5, 8, 4, 1.25, True, 7), torch.get_num_threads()
    tables = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        tables.append(interval_distortion(*args, impl="numba"))
    torch.set_num_threads(before)
    assert torch.allclose(tables[0].distortion, tables[1].distortion, atol=1e-6)
    assert torch.allclose(tables[0].multiplicity, tables[1].multiplicity, rtol=1e-5)


def test_without_numba_the_torch_path_is_taken_and_said_once(monkeypatch, caplog):
    op = importlib.import_module("kvframe.ops.interval_distortion")
    monkeypatch.setattr(op, "find_spec", lambda name: None)
    op.compiled.cache_clear()
    args = make(1, 1, 5, 2, 4, 4, 1.0, False, 3)
    with caplog.at_level("INFO", logger="kvframe"):
        first, second = interval_distortion(*args), interval_distortion(*args)
    op.compiled.cache_clear()
    assert torch.equal(first.distortion, interval_distortion(*args, impl="fast").distortion)
    assert torch.equal(second.distortion, first.distortion)
    assert len(caplog.records) == 1
    monkeypatch.setattr(op, "compiled", lambda: False)
    with pytest.raises(InputError, match=r"needs numba: pip install 'kvframe\[cpu\]', or use impl='auto'"):
        interval_distortion(*args, impl="numba")


def test_the_mass_of_all_tokens_is_one():
    tables = interval_distortion(*make(1, 3, 33, 5, 8, 4, 1.0, True, 4))
    assert torch.allclose(tables.mass.sum(-1), torch.ones(3), atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150), st.integers(1, 9), st.integers(0, 10**6))
def test_gram_band_is_a_band_of_the_gram_matrix(tokens, longest, seed):
    rows = torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(seed)).double()
    band, gram = gram_band(rows, longest), rows @ rows.mT
    for offset in range(longest):
        wanted = torch.zeros(2, tokens).double()
        if offset < tokens:
            wanted[:, : tokens - offset] = gram.diagonal(offset, 1, 2)
        assert torch.allclose(band[:, offset], wanted, atol=1e-12)


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 10**6))
def test_interval_sums_are_sums(tokens, longest, seed):
    row = torch.rand(tokens, generator=torch.Generator().manual_seed(seed))
    sums = interval_sums(row, longest)
    for length in range(1, longest + 1):
        for begin in range(tokens):
            assert float(sums[length - 1, begin]) == pytest.approx(float(row[begin : begin + length].sum()), rel=1e-5)


def test_an_unknown_implementation_is_named():
    with pytest.raises(InputError, match="no implementation 'cuda'; there are: auto, reference, fast, numba, triton"):
        interval_distortion(*make(1, 1, 2, 1, 4, 4, 1.0, False, 2), impl="cuda")
