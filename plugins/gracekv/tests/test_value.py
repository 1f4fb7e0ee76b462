"""Token values and head sensitivities, against loops in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import StageError
from kvframe.types import LayerObservation, Segments
from kvframe_gracekv import ValueFlow
from kvframe_gracekv.rows import rows
from kvframe_gracekv.sensitivity import head_sensitivity

LENGTHS = st.lists(st.sampled_from([1, 2, 7, 33]), min_size=1, max_size=3)
SCORERS = [
    ValueFlow(hops=0, question_probes=3, sequence_probes=2),
    ValueFlow(question_probes=3, sequence_probes=2, seeds=3),
    ValueFlow(question_probes=2, sequence_probes=1, hops=3, seed_weights="equal", seeds=2, graph_share=0.7),
]


def whole(seen):
    return Segments(torch.zeros_like(seen.valid, dtype=torch.int32))


def spelled_out(scorer, seen, probes):
    """`[L, H, N]` of a batch of one row without padding."""
    model, body = seen.model, seen.body[0].nonzero()[:, 0].tolist()

    def attention(layer, head, u):
        query = seen.layers[layer].queries[0, head, u].double()
        keys = seen.layers[layer].keys[0, head // model.group, : u + 1].double()
        out = torch.zeros(seen.shape[-1]).double()
        out[: u + 1] = (keys @ query * model.scale).softmax(0)
        return out[body]

    direct = torch.zeros(model.layers, model.kv_heads, len(body)).double()
    for layer in range(model.layers):
        for head in range(model.query_heads):
            direct[layer, head // model.group] += sum(attention(layer, head, u) for u in probes)
    direct = direct / direct.sum(-1, keepdim=True)
    if not scorer.hops:
        return direct
    layers = sorted({min(int(rho * model.layers), model.layers - 1) for rho in scorer.graph_depths})
    mass, total, spent = direct.mean((0, 1)), torch.zeros(len(body)).double(), set()
    for hop in range(scorer.hops):
        order = sorted(range(len(body)), key=lambda t: -float(mass[t]))
        seeds, held = [], 0.0
        for t in order:
            if held >= scorer.seed_mass * float(mass.sum()) or len(seeds) == scorer.seeds or mass[t] <= 0:
                break
            seeds.append(t)
            held += float(mass[t])
        if not seeds:
            break
        weights = [float(mass[t]) / held if scorer.seed_weights == "mass" else 1 / len(seeds) for t in seeds]
        spent |= set(seeds)
        mass = sum(
            weight * attention(layer, head, body[t])
            for weight, t in zip(weights, seeds, strict=True)
            for layer in layers
            for head in range(model.query_heads)
        )
        mass[list(spent)] = 0
        total += scorer.decay**hop * mass
    uniform = torch.full_like(total, 1 / len(body))
    flow = total / total.sum() if total.sum() > 0 else uniform
    return (1 - scorer.graph_share) * direct + scorer.graph_share * flow


@pytest.mark.parametrize("scorer", SCORERS, ids=["direct", "paper", "three hops"])
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), sink=st.integers(0, 2), suffix=st.integers(0, 4))
def test_values_are_the_definition_whatever_the_padding(make, scorer, lengths, seed, sink, suffix):
    lengths = [n + 4 for n in lengths]
    shape = {"seed": seed, "sink": sink, "suffix": suffix}
    scores = scorer.score(together := make(lengths, **shape, extra=3), whole(together))
    assert scores.shape == together.shape
    for row, n in enumerate(lengths):
        alone = make(lengths, **shape, only=row)
        asked, sequence = scorer.question_probes, scorer.sequence_probes
        probes = range(max(0, n - asked - sequence), n)
        if suffix:
            probes = [u for u in probes if u >= n - suffix or u >= n - sequence]
        got = scores[:, row, :, -n:][..., alone.body[0]]
        if not got.numel():
            continue
        assert torch.allclose(got.double(), spelled_out(scorer, alone, list(probes)), atol=1e-5)
        assert torch.allclose(got.sum(-1), torch.ones(2, 2), atol=1e-4)


def test_direct_relevance_observes_the_probes_only():
    assert SCORERS[0].needs.queries == 5
    assert ValueFlow(graph_share=0).needs.queries == 48
    assert ValueFlow().needs.queries == "all"


def test_missing_observations_are_named(make):
    seen = make([9])
    blind = replace(seen, layers=tuple(LayerObservation(x.keys, x.values) for x in seen.layers))
    with pytest.raises(StageError, match=r"needs the outputs of the heads.*sensitivity: static"):
        head_sensitivity(blind, next(rows(blind, 2, 1)), "static_input", "x")


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([2, 7, 33]), st.integers(0, 99))
def test_sensitivity_is_the_definition(make, tokens, seed):
    seen = make([tokens], seed=seed, suffix=2)
    row = next(rows(seen, 2, 1))
    got = head_sensitivity(seen, row, "static_input", "x")
    raw = torch.zeros(2, 2).double()
    for layer in range(2):
        weight = seen.model.output_weight(layer).double()  # [Hq, D, hidden]
        for head in range(2):
            mine = [2 * head, 2 * head + 1]
            static = sum(float(weight[h].square().sum()) for h in mine) ** 0.5
            outputs = seen.layers[layer].head_outputs[0].double()
            written = [float(sum(weight[h].T @ outputs[h, u] for h in mine).norm()) for u in (tokens - 2, tokens - 1)]
            raw[layer, head] = (static * sum(written) / 2) ** 0.5
    assert torch.allclose(got.double(), raw / raw.mean(), rtol=1e-5)
    assert torch.equal(head_sensitivity(seen, row, "none", "x"), torch.ones(2, 2))
