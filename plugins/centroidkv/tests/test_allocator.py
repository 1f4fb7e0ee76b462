"""The allocator against a version spelled out with loops, and the laws of plans."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

import kvframe_centroidkv.passes as passes
from kvframe.builtin.segmenters import Chunks
from kvframe.errors import InputError, StageError
from kvframe.execute import check_plan, execute
from kvframe.ops import ragged_attention
from kvframe.types import LayerObservation, LayerPlan, Observation, Plan
from kvframe_centroidkv import SoftMatching
from kvframe_centroidkv.partition import scramble

SETTINGS = settings(max_examples=25, deadline=None)
METHODS = [
    SoftMatching(),
    SoftMatching(share="head", safeguard=0, max_share=1, rope="post"),
    SoftMatching(share="layer", partition="halves", similarity="ward", safeguard=0.3),
    SoftMatching(partition="random", seed=5, similarity="distance", safeguard=1, max_share=0.01),
    SoftMatching(schedule="tighten", multiplicity="coherence", rope="post"),
    SoftMatching(schedule="relax", thresholds=(0.9, 0.2), multiplicity="none", share="layer", max_share=1),
    SoftMatching(partition="halves", share="head", schedule="relax"),
]
every_method = pytest.mark.parametrize(
    "method", METHODS, ids=["default", "paper", "ward", "random", "tighten", "relax", "halves"]
)


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Rows, a budget for each as a share of its body, and a chunk size, which may be longer than the text."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 7, 33, 50]), min_size=1, max_size=3))
    return {
        "lengths": lengths,
        "seed": draw(st.integers(0, 10**4)),
        "layers": draw(st.sampled_from([1, 3])),
        "heads": draw(st.sampled_from([1, 2])),
        "sink": draw(st.sampled_from([0, 4])),
        "recent": draw(st.sampled_from([0, 3])),
        "shares": draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths))),
        "chunk": draw(st.sampled_from([1, 2, 5, 16, 300])),
    }


def set_up(case: dict, make_observation, alone: int | None = None, extra: int = 0, **changes):
    """Observation, segments, scores and budget of a case."""
    shape = {k: v for k, v in case.items() if k not in ("lengths", "seed", "shares", "chunk")}
    observation = make_observation(case["lengths"], case["seed"], alone=alone, extra=extra, **shape, **changes)
    layers, batch, heads, tokens = observation.shape
    scores = torch.zeros(observation.shape)
    for index in range(batch):
        row = index if alone is None else alone
        generator = torch.Generator().manual_seed(case["seed"] + row)
        n = case["lengths"][row]
        scores[:, index, :, tokens - n :] = torch.rand(layers, heads, n, generator=generator)
    scores = scores * observation.body[None, :, None]
    shares = torch.tensor([case["shares"][row] for row in (range(batch) if alone is None else [alone])])
    budget = layers * heads * observation.body.sum(1) * shares // 1000
    return observation, Chunks(size=case["chunk"]).segment(observation), scores, budget


def groups_of(plan: Plan, row: int) -> dict[tuple[int, int], set[frozenset[int]]]:
    """(layer, head) -> the sets of tokens that are one entry, counted from the right end."""
    out = {}
    for index, layer in enumerate(plan.layers):
        for head, line in enumerate(layer.assignment[row].tolist()):
            entries: dict[int, set[int]] = {}
            for token, entry in enumerate(line):
                if entry >= 0:
                    entries.setdefault(entry, set()).add(token - len(line))
            out[index, head] = {frozenset(tokens) for tokens in entries.values()}
    return out


def alike(method: SoftMatching, a: dict, b: dict) -> float:
    ka, kb = a["sum"] / a["n"], b["sum"] / b["n"]
    if method.similarity == "cosine":
        return float(ka @ kb / (ka.norm() * kb.norm()))
    distance = -float((ka - kb).square().sum())
    return distance if method.similarity == "distance" else distance * a["n"] * b["n"] / (a["n"] + b["n"])


def first_of_ties(method: SoftMatching, a: dict, others: list[dict]) -> int:
    """The first of the most alike, up to the rounding of fp32: 2^-17 of the squared norm, for Ward times the count."""
    slack = 2.0**-17
    if method.similarity != "cosine":
        slack *= float((a["sum"] / a["n"]).square().sum()) * (a["n"] if method.similarity == "ward" else 1)
    scores = [alike(method, a, b) for b in others]
    return next(i for i, score in enumerate(scores) if score >= max(scores) - slack)


def to_17_bits(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2**17) / 2**17, exponent)


def spelled_out(
    method: SoftMatching, observation: Observation, segments: Tensor, scores: Tensor, budget: int
) -> tuple[dict[tuple[int, int], set[frozenset[int]]], int]:
    """The method on row 0 with loops over tokens and entries; and its number of passes."""
    layers, _, heads, tokens = observation.shape
    body = [t for t in range(tokens) if observation.body[0, t]]
    units = [(layer, head) for layer in range(layers) for head in range(heads)]
    if method.share == "head":
        groups = [[unit] for unit in units]
    elif method.share == "layer":
        groups = [[(layer, head) for head in range(heads)] for layer in range(layers)]
    else:
        groups = [units]
    longest = max([2, *(sum(int(segments[0, t]) == s for t in body) for s in range(tokens))])
    result: dict[tuple[int, int], set[frozenset[int]]] = {}
    most_turns = 0
    for place, group in enumerate(groups):
        total = budget // len(groups) + (place < budget % len(groups))
        alive = group[:total]
        count = max(0, min(math.floor(method.safeguard * total / len(group)), (total - len(group)) // len(group)))
        left: dict[tuple[int, int], list[dict]] = {}
        for layer, head in group:
            result[layer, head] = set()
        for layer, head in alive:
            best = sorted(body, key=lambda t: (-float(scores[layer, 0, head, t]), t))[:count]
            result[layer, head] |= {frozenset([t - tokens]) for t in best}
            keys = observation.layers[layer].keys[0, head]
            if method.rope == "pre":
                keys = observation.model.rope.unrotate(keys, observation.positions[0])
            left[layer, head] = [
                {"sum": keys[t], "n": 1, "tokens": [t], "segment": int(segments[0, t])} for t in body if t not in best
            ]
        turn = 0
        while (excess := sum(map(len, left.values())) + count * len(alive) - total) > 0:
            edges = []
            for layer, head in alive:
                entries = left[layer, head]
                chunks: dict[int, list[int]] = {}
                for rank, entry in enumerate(entries):
                    chunks.setdefault(entry["segment"] if turn == 0 else rank // longest, []).append(rank)
                for ranks in chunks.values():
                    sources, targets = ranks[0::2], ranks[1::2]
                    if method.partition == "halves":
                        sources, targets = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
                    if method.partition == "random":
                        stream = torch.tensor(layer * heads + head)
                        drawn = sorted(ranks, key=lambda r: int(scramble(method.seed, turn, stream, torch.tensor(r))))
                        sources, targets = drawn[0::2], drawn[1::2]
                    for a in sources:
                        if targets:
                            others = [entries[b] for b in targets]
                            confidence = max(alike(method, entries[a], other) for other in others)
                            best = targets[first_of_ties(method, entries[a], others)]
                            edges.append((confidence, (layer, head), a, best))
            cap = math.ceil(method.max_share * len(edges))
            if turn < len(method.steps):
                edges = [edge for edge in edges if edge[0] >= method.steps[turn]]
            edges.sort(key=lambda edge: -to_17_bits(edge[0]))
            gone: dict[tuple[int, int], set[int]] = {unit: set() for unit in alive}
            for _, unit, a, b in edges[: min(cap, excess)]:
                source, target = left[unit][a], left[unit][b]
                target["sum"] = target["sum"] + source["sum"]
                target["n"] += source["n"]
                target["tokens"] = target["tokens"] + source["tokens"]
                gone[unit].add(a)
            for unit in alive:
                left[unit] = [entry for rank, entry in enumerate(left[unit]) if rank not in gone[unit]]
            turn += 1
        most_turns = max(most_turns, turn)
        for unit in alive:
            result[unit] |= {frozenset(t - tokens for t in entry["tokens"]) for entry in left[unit]}
    return result, most_turns


@every_method
@SETTINGS
@given(case=cases())
def test_matches_the_spelled_out_version(method, case, make_observation):
    turns = []
    with pytest.MonkeyPatch.context() as patch:
        import kvframe_centroidkv.allocator as allocator

        def spy(*args):
            turns.append(passes.cluster(*args))
            return turns[-1]

        patch.setattr(allocator, "cluster", spy)
        observation, segments, scores, budget = set_up(case, make_observation)
        plan = method.allocate(observation, segments, scores, budget)
    most = 0
    for row in range(len(budget)):
        alone, own, own_scores, own_budget = set_up(case, make_observation, alone=row)
        assert own_budget == budget[row]
        wanted, count = spelled_out(method, alone, own.ids, own_scores, int(own_budget))
        assert groups_of(plan, row) == wanted
        most = max(most, count)
    # Layers may be clustered in several calls, rows and heads together: the longest of them counts.
    assert max(clusters.passes for clusters in turns) == most


@every_method
@SETTINGS
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_plan_laws(method, case, dtype, make_observation):
    observation, segments, scores, budget = set_up(case, make_observation, dtype=dtype)
    before = [layer.keys.clone() for layer in observation.layers]
    plan = method.allocate(observation, segments, scores, budget)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, observation.layers, strict=True))
    check_plan(plan, observation, budget, method.name)
    # Exact: nothing of the budget is left over.
    assert torch.equal(sum(layer.n_entries.sum(1) for layer in plan.layers), budget)
    for layer, shown in zip(plan.layers, observation.layers, strict=True):
        entries = execute(layer, shown, observation.positions, observation.model.rope)
        assert layer.align_rope == (method.rope == "pre")
        ids = layer.assignment.flatten(0, 1)
        size = torch.cat(
            [
                torch.bincount(line[line >= 0], minlength=int(n))
                for line, n in zip(ids, layer.n_entries.flatten(), strict=True)
            ]
        )
        if layer.multiplicity is not None:
            assert (layer.multiplicity >= 1).all()
            assert (layer.multiplicity <= size).all()
            assert method.multiplicity != "none" or (layer.multiplicity == 1).all()
        else:
            assert method.multiplicity == "count"
        for begin, end in zip(entries.bounds, entries.bounds[1:], strict=False):
            assert (entries.positions[begin:end].diff() >= 0).all()


@every_method
@SETTINGS
@given(case=cases())
def test_ratio_1_is_the_identity(method, case, make_observation):
    observation, segments, scores, budget = set_up({**case, "shares": [1000] * len(case["shares"])}, make_observation)
    for asked in (budget, budget + 1000):
        plan = method.allocate(observation, segments, scores, asked)
        kept = LayerPlan.keep(observation.body[:, None].expand(observation.shape[1:]))
        for layer in plan.layers:
            assert torch.equal(layer.assignment, kept.assignment)


@every_method
@SETTINGS
@given(case=cases(), extra=st.integers(0, 9))
def test_row_alone_is_row_in_a_padded_batch(method, case, extra, make_observation):
    observation, segments, scores, budget = set_up(case, make_observation, extra=extra, dtype=torch.float32)
    plan = method.allocate(observation, segments, scores, budget)
    for row, n in enumerate(case["lengths"]):
        alone, own, own_scores, own_budget = set_up(case, make_observation, alone=row, dtype=torch.float32)
        for mine, theirs in zip(method.allocate(alone, own, own_scores, own_budget).layers, plan.layers, strict=True):
            assert torch.equal(mine.assignment[0], theirs.assignment[row, :, -n:])
            assert (theirs.assignment[row, :, :-n] == -1).all()


@every_method
@SETTINGS
@given(case=cases(), more=st.integers(0, 30))
def test_a_larger_budget_merges_fewer_tokens(method, case, more, make_observation):
    observation, segments, scores, budget = set_up(case, make_observation)
    full = observation.shape[0] * observation.shape[2] * observation.body.sum(1)
    larger = torch.minimum(budget + more, full)
    # Every token is somewhere as long as each head may have an entry; then tokens - entries = merges.
    enough = budget >= observation.shape[0] * observation.shape[2]
    for asked in (budget, larger):
        plan = method.allocate(observation, segments, scores, asked)
        kept = sum((layer.assignment >= 0).sum((1, 2)) for layer in plan.layers)
        entries = sum(layer.n_entries.sum(1) for layer in plan.layers)
        assert torch.equal(kept[enough], full[enough])
        assert torch.equal(entries, asked)


@every_method
@pytest.mark.parametrize("tokens", [2, 33, 500])
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_passes_are_bounded(method, tokens, chunk, make_observation, monkeypatch):
    # A limit that is too low would raise StageError: one entry a head is the furthest that passes can go.
    observation = make_observation([tokens], layers=2, heads=2, dtype=torch.float32)
    segments = Chunks(size=chunk).segment(observation)
    if method.max_share < 0.1 and tokens > 100:
        method = method.model_copy(update={"max_share": 0.1})
    plan = method.allocate(observation, segments, torch.ones(observation.shape), torch.tensor([4]))
    assert all((layer.n_entries == 1).all() for layer in plan.layers)


def test_a_fault_of_the_passes_is_named(make_observation, monkeypatch):
    monkeypatch.setattr(passes, "turn_limit", lambda *_: 1)
    observation = make_observation([33])
    with pytest.raises(StageError, match="entries more than its budget after 1 passes; this is a fault of the stage"):
        SoftMatching(safeguard=0).allocate(
            observation, Chunks().segment(observation), torch.ones(observation.shape), torch.tensor([4])
        )


def test_heads_with_more_redundancy_merge_more(make_observation):
    observation = make_observation([65], layers=2, heads=2, dtype=torch.float32)
    # Head (1, 0) says the same thing over and over.
    keys = observation.layers[1].keys.clone()
    turned = observation.model.rope.rotate(torch.ones(65, 8), observation.positions[0])
    keys[0, 0] = turned + keys[0, 0] * 0.01
    layers = (observation.layers[0], LayerObservation(keys, observation.layers[1].values))
    observation = Observation(layers, observation.positions, observation.valid, observation.body, observation.model)
    segments, scores, budget = Chunks().segment(observation), torch.ones(observation.shape), torch.tensor([130])
    counts = {
        share: torch.stack(
            [
                layer.n_entries[0]
                for layer in SoftMatching(share=share, safeguard=0)
                .allocate(observation, segments, scores, budget)
                .layers
            ]
        )
        for share in ("head", "layer", "global")
    }
    assert counts["head"].tolist() == [[33, 33], [32, 32]]
    assert counts["layer"].sum(1).tolist() == [65, 65]
    assert counts["layer"][1, 0] < counts["layer"][1, 1]
    assert counts["global"][1, 0] < counts["global"].flatten()[[0, 1, 3]].min()


def test_a_budget_too_small_for_all_heads_empties_the_last_ones(make_observation):
    observation = make_observation([33], layers=2, heads=2)
    for share in ("head", "layer", "global"):
        plan = SoftMatching(share=share).allocate(
            observation, Chunks().segment(observation), torch.ones(observation.shape), torch.tensor([3])
        )
        assert [layer.n_entries[0].tolist() for layer in plan.layers] == [[1, 1], [1, 0]]


def test_safeguarded_tokens_are_singletons(make_observation):
    observation = make_observation([50], layers=2, heads=2)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(observation.shape, generator=generator)
    plan = SoftMatching(safeguard=0.5).allocate(observation, Chunks().segment(observation), scores, torch.tensor([80]))
    for (layer, head), entries in groups_of(plan, 0).items():
        best = scores[layer, 0, head].topk(10).indices.tolist()
        assert {frozenset([t - 50]) for t in best} <= entries


@every_method
def test_nothing_to_do(method, make_observation):
    """No body at all: everything is protected."""
    observation = make_observation([3, 1], sink=4)
    assert not observation.body.any()
    plan = method.allocate(
        observation, Chunks().segment(observation), torch.zeros(observation.shape), torch.tensor([0, 0])
    )
    check_plan(plan, observation, torch.tensor([0, 0]), method.name)


@every_method
def test_keys_of_zero_norm_and_equal_keys(method, make_observation):
    observation = make_observation([50, 33], layers=2, heads=2, dtype=torch.float32)
    budget = torch.tensor([40, 40])
    for keys in (torch.zeros(2, 2, 50, 8), torch.ones(2, 2, 50, 8), torch.full((2, 2, 50, 8), 1e-30)):
        layers = tuple(LayerObservation(keys, layer.values) for layer in observation.layers)
        same = Observation(layers, observation.positions, observation.valid, observation.body, observation.model)
        plan = method.allocate(same, Chunks(size=16).segment(same), torch.ones(same.shape), budget)
        check_plan(plan, same, budget, method.name)
        assert torch.equal(sum(layer.n_entries.sum(1) for layer in plan.layers), budget)
        for layer in plan.layers:
            entries = execute(layer, layers[0], same.positions, same.model.rope)
            assert entries.keys.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_keys_that_are_not_finite_are_named(bad, make_observation):
    observation = make_observation([50, 33], layers=3, heads=2, dtype=torch.float32)
    observation.layers[2].keys[1, 0, 40, 3] = bad
    with pytest.raises(InputError, match=r"keys of layer 2 are not finite \(row 1, KV head 0, column 40\).*bfloat16"):
        SoftMatching(safeguard=0).allocate(
            observation, Chunks().segment(observation), torch.ones(observation.shape), torch.tensor([60, 60])
        )


def test_padding_may_hold_anything(make_observation):
    observation = make_observation([50, 33], dtype=torch.float32)
    segments, scores, budget = Chunks().segment(observation), torch.ones(observation.shape), torch.tensor([60, 60])
    before = SoftMatching().allocate(observation, segments, scores, budget)
    for layer in observation.layers:
        layer.keys[1, :, :17] = torch.nan
    after = SoftMatching().allocate(observation, segments, scores, budget)
    for a, b in zip(before.layers, after.layers, strict=True):
        assert torch.equal(a.assignment, b.assignment)


@pytest.mark.parametrize("copies", [2, 7, 33])
def test_merging_identical_entries_changes_attention_by_rounding_only(copies, make_observation):
    """Runs of equal cached keys and values, merged down to one entry a run: attention is the same."""
    kinds = 5
    observation = make_observation([kinds * copies], layers=1, heads=2, dtype=torch.float32)
    generator = torch.Generator().manual_seed(copies)
    keys, values = (torch.randn(1, 2, kinds, 8, generator=generator).repeat_interleave(copies, 2) for _ in range(2))
    layer = LayerObservation(keys, values)
    same = Observation((layer,), observation.positions, observation.valid, observation.body, observation.model)
    query = torch.randn(1, 4, 3, 8, generator=generator)
    whole = execute(LayerPlan.keep(same.body[:, None].expand(1, 2, -1)), layer, same.positions, same.model.rope)
    wanted = ragged_attention(query.double(), whole, 0.5, impl="reference")
    for multiplicity in ("count", "coherence", "none"):
        # A run of n >= 2 has at least one edge of no cost, so passes that take few edges take only those.
        method = SoftMatching(
            share="head", safeguard=0, rope="post", similarity="ward", multiplicity=multiplicity, max_share=0.05
        )
        plan = method.allocate(same, Chunks(size=300).segment(same), torch.ones(same.shape), torch.tensor([2 * kinds]))
        merged = execute(plan.layers[0], layer, same.positions, same.model.rope)
        assert len(merged.keys) == 2 * kinds
        got = ragged_attention(query.double(), merged, 0.5, impl="reference")
        # Means of equal fp32 rows and a fp32 logarithm: a few roundings of numbers below 8. Equal weights of all
        # entries leave the softmax as it is, but not its log-sum-exp.
        error = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
        assert (error <= 64 * torch.finfo(torch.float32).eps) == (multiplicity != "none")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thresholds": (0.5,)}, "thresholds belong to schedule tighten or relax"),
        ({"schedule": "tighten", "thresholds": (0.9, 0.8)}, "thresholds must rise with schedule tighten"),
        ({"schedule": "relax", "thresholds": (0.8, 0.9)}, "thresholds must fall with schedule relax"),
        ({"schedule": "relax", "thresholds": (1.5, 0.9)}, "cosines between -1 and 1"),
        ({"schedule": "relax", "similarity": "ward"}, "needs similarity cosine"),
        ({"max_share": 0}, "greater than 0"),
        ({"safeguard": 1.1}, "less than or equal to 1"),
        ({"share": "row"}, "'head', 'layer' or 'global'"),
        ({"chunk": 64}, "Extra inputs are not permitted"),
    ],
)
def test_bad_parameters(fields, message):
    with pytest.raises(ValidationError, match=message):
        SoftMatching(**fields)
