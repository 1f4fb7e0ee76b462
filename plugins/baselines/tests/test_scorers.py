"""Every scorer against a readable fp64 reference, and the laws of scorers: padding and neighbours change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

import kvframe_baselines.columns as columns_module
from kvframe.errors import StageError
from kvframe.stages import Scorer
from kvframe_baselines import H2O, TOVA, ExpectedAttention, KeyDiff, KeyNorm, SnapKV, Streaming
from kvframe_baselines.attention_scorers import pool_tokens

LENGTHS = st.sampled_from([1, 2, 7, 33, 65])
SETTINGS = settings(max_examples=25, deadline=None)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of `make_prompts`: up to three rows, grouped heads, partial and scaled RoPE, bf16."""
    dim = draw(st.sampled_from([4, 8]))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "lengths": draw(st.lists(LENGTHS, min_size=1, max_size=3)),
        "layers": draw(st.sampled_from([1, 2])),
        "heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 2, 3])),
        "dim": dim,
        "rotary": draw(st.sampled_from([dim, dim // 2])),
        "scaling": draw(st.sampled_from([1.0, 1.25])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "sink": draw(st.sampled_from([0, 4])),
        "recent": draw(st.sampled_from([0, 3])),
    }


SCORERS: list[Scorer] = [
    Streaming(),
    H2O(),
    H2O(normalise="sum"),
    SnapKV(window=3),
    SnapKV(pool="max", pool_width=21),
    SnapKV(window=5, pool_width=1),
    TOVA(),
    KeyNorm(),
    KeyDiff(),
    ExpectedAttention(horizon=5),
    ExpectedAttention(horizon=40, skip=0, eps=0.02),
]


# The references: one row without padding, plain loops in fp64.


def attention_matrix(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Causal attention `[n, n]` of one query head."""
    n = len(keys)
    out = torch.zeros(n, n, dtype=torch.float64)
    for q in range(n):
        out[q, : q + 1] = (queries[q] @ keys[: q + 1].T * scale).softmax(-1)
    return out


def reference(scorer: Scorer, prompts, row) -> Tensor:
    """Scores `[L, H, n]` of one row."""
    model = prompts.model
    out = torch.zeros(model.layers, model.kv_heads, row.length, dtype=torch.float64)
    for layer in range(model.layers):
        for head in range(model.kv_heads):
            keys, values = row.keys[layer, head].double(), row.values[layer, head].double()
            group = range(head * model.group, (head + 1) * model.group)
            queries = {h: row.queries[layer, h].double() for h in range(model.query_heads)}
            out[layer, head] = reference_head(scorer, model, row, keys, values, queries, group)
    return out


def reference_head(scorer, model, row, keys, values, queries, group) -> Tensor:
    n = row.length
    if isinstance(scorer, Streaming):
        return torch.arange(1, n + 1).double()
    if isinstance(scorer, KeyNorm):
        return torch.tensor([1 / (1 + math.sqrt(float(k @ k))) for k in keys])
    if isinstance(scorer, KeyDiff):
        directions = [k / k.norm() for k in keys]
        anchor = sum(directions) / n
        return torch.stack([1 - d @ anchor / anchor.norm() for d in directions])
    if isinstance(scorer, TOVA):
        return sum(
            attention_matrix(q, keys_of(model, row, h, keys), model.scale)[-1] for h, q in queries.items()
        ) / len(queries)
    if isinstance(scorer, H2O):
        total = sum(attention_matrix(queries[h], keys, model.scale).sum(0) for h in group) / len(group)
        if scorer.normalise == "mean":
            total = total / torch.tensor([n - t for t in range(n)])
        return total
    if isinstance(scorer, SnapKV):
        pooled = torch.zeros(n, dtype=torch.float64)
        half = scorer.pool_width // 2
        for h in group:
            window = attention_matrix(queries[h], keys, model.scale)[-scorer.window :]
            mean = window.sum(0) / len(window) * row.body
            for t in range(n):
                around = [float(mean[s]) if 0 <= s < n else 0.0 for s in range(t - half, t + half + 1)]
                pooled[t] += (sum(around) / scorer.pool_width if scorer.pool == "average" else max(around)) / len(group)
        return pooled
    if isinstance(scorer, ExpectedAttention):
        return expected_attention(scorer, model, keys, values, queries, group)
    raise TypeError(scorer)


def keys_of(model, row, query_head: int, keys: Tensor) -> Tensor:
    """TOVA averages over all heads, so each query head needs its own KV head's keys; `keys` tells the layer."""
    layer = next(
        index
        for index in range(model.layers)
        if any(torch.equal(row.keys[index, h].double(), keys) for h in range(model.kv_heads))
    )
    return row.keys[layer, query_head // model.group].double()


def rotation(model, position: int) -> Tensor:
    """The RoPE matrix of one position, `[D, D]`, written out pair by pair."""
    out = torch.eye(model.head_dim, dtype=torch.float64)
    half = len(model.rope.inv_freq)
    for i, frequency in enumerate(model.rope.inv_freq.double().tolist()):
        cos, sin = (f(position * frequency) * model.rope.scaling for f in (math.cos, math.sin))
        out[i, i], out[i, i + half], out[i + half, i], out[i + half, i + half] = cos, -sin, sin, cos
    return out


def expected_attention(scorer, model, keys, values, queries, group) -> Tensor:
    n = len(keys)
    mean_rotation = sum(rotation(model, n + j) for j in range(scorer.horizon)) / scorer.horizon
    total = torch.zeros(n, dtype=torch.float64)
    for h in group:
        plain = torch.stack([torch.linalg.inv(rotation(model, t)) @ queries[h][t] for t in range(n)])
        used = plain[scorer.skip :] if n > scorer.skip else plain
        mean = used.mean(0)
        covariance = sum(torch.outer(q - mean, q - mean) for q in used) / len(used)
        mean, covariance = mean_rotation @ mean, mean_rotation @ covariance @ mean_rotation.T
        logits = torch.stack([model.scale * (k @ mean) + model.scale**2 / 2 * (k @ covariance @ k) for k in keys])
        total += logits.softmax(0)
    return (total / len(group) + scorer.eps) * values.norm(dim=-1)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@SETTINGS
@given(shape=shapes())
def test_matches_the_reference(scorer: Scorer, shape: dict, make_prompts, whole) -> None:
    prompts = make_prompts(**shape)
    observation, columns = prompts.left_padded()
    scores = scorer.score(observation, whole(observation))
    assert scores.shape == observation.shape
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert (scores >= 0).all()
    for index, row in enumerate(prompts.rows):
        # What stands outside the body is never read.
        close(scores[:, index][..., columns[index]][..., row.body], reference(scorer, prompts, row)[..., row.body])


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
@SETTINGS
@given(shape=shapes(), seed=st.integers(0, 2**31), extra=st.integers(0, 9))
def test_row_alone_is_row_in_a_batch_whatever_the_padding(
    scorer: Scorer, shape: dict, seed: int, extra: int, make_prompts, whole
) -> None:
    prompts = make_prompts(**shape)
    padded = [prompts.left_padded(extra), prompts.scattered(seed)]
    for index, row in enumerate(prompts.rows):
        alone = prompts.alone(index)
        wanted = scorer.score(alone, whole(alone))[:, 0][..., row.body]
        for observation, columns in padded:
            close(scorer.score(observation, whole(observation))[:, index][..., columns[index]][..., row.body], wanted)


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_scores_only_what_it_says_it_needs(scorer: Scorer, make_prompts, whole) -> None:
    prompts = make_prompts(3, [33, 20, 2])
    everything, _ = prompts.left_padded()
    queries = scorer.needs.queries
    observed = 33 if queries == "all" else min(33, queries)
    needed, _ = prompts.left_padded(observed=observed)
    close(scorer.score(needed, whole(needed)), scorer.score(everything, whole(everything)))


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_a_row_of_padding_alone_is_finite(scorer: Scorer, make_prompts, whole) -> None:
    observation, _ = make_prompts(1, [9, 0]).left_padded()
    scores = scorer.score(observation, whole(observation))
    assert scores.isfinite().all()
    assert (scores >= 0).all()


@pytest.mark.parametrize("scorer", [H2O(), SnapKV(), TOVA(), ExpectedAttention()], ids=repr)
def test_missing_queries_are_an_error(scorer: Scorer, make_prompts, whole) -> None:
    observation, _ = make_prompts(1, [9]).left_padded()
    layers = tuple(type(layer)(layer.keys, layer.values) for layer in observation.layers)
    blind = type(observation)(layers, observation.positions, observation.valid, observation.body, observation.model)
    with pytest.raises(StageError, match=scorer.name):
        scorer.score(blind, whole(blind))


@pytest.mark.parametrize("block", [1, 300, 10_000])
def test_the_block_size_changes_nothing(block: int, make_prompts, whole, monkeypatch) -> None:
    observation, _ = make_prompts(5, [65, 33]).left_padded()
    wanted = H2O().score(observation, whole(observation))
    monkeypatch.setattr(columns_module, "CPU_BLOCK", block)
    close(H2O().score(observation, whole(observation)), wanted)


def test_attention_sums_to_one_per_query(make_prompts) -> None:
    observation, _ = make_prompts(5, [33, 7, 2]).left_padded()
    layer = observation.layers[0]
    columns = columns_module.last_tokens(observation.valid, 4, 33)
    assert columns.tolist() == [[29, 30, 31, 32], [29, 30, 31, 32], [-1, -1, 31, 32]]
    sums = columns_module.attention_sums(layer, layer.queries, columns, observation.valid, 1.0)
    torch.testing.assert_close(sums.sum(-1), torch.tensor([4.0, 4.0, 2.0])[:, None].expand(3, 4))
    assert (sums.masked_select(~observation.valid[:, None].expand_as(sums)) == 0).all()


def test_pooling_skips_padding() -> None:
    valid = torch.tensor([[True, False, False, True, True]])
    scores = torch.tensor([9.0, 5.0, 5.0, 3.0, 0.0]).view(1, 1, 1, 5)
    pooled = pool_tokens(scores, valid, "average", 3)[0, 0, 0]
    assert pooled[valid[0]].tolist() == [4.0, 4.0, 1.0]
    pooled = pool_tokens(scores, valid, "max", 3)[0, 0, 0]
    assert pooled[valid[0]].tolist() == [9.0, 9.0, 3.0]


def test_a_wider_pool_covers_a_needle() -> None:
    valid = torch.ones(1, 40, dtype=torch.bool)
    peak = torch.zeros(1, 1, 1, 40)
    peak[..., 20] = 1
    assert int((pool_tokens(peak, valid, "max", 5) > 0).sum()) == 5
    assert int((pool_tokens(peak, valid, "max", 21) > 0).sum()) == 21


def test_an_even_pool_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"must be odd.*use 3 or 5"):
        SnapKV(pool_width=4)


def test_streaming_keeps_the_last_tokens(make_prompts, whole) -> None:
    observation, columns = make_prompts(1, [9, 4]).left_padded()
    scores = Streaming().score(observation, whole(observation))
    assert scores[0, 1, 0, columns[1]].tolist() == [1, 2, 3, 4]
