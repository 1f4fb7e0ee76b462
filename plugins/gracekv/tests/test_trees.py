"""The paper's trees, floor and auction: their laws, and the heap against a greedy search."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe_gracekv.auction import FRONTIER, UNREACHED, Auction
from kvframe_gracekv.budget_flow import frontier
from kvframe_gracekv.floor import FloorRule, floor_candidates
from kvframe_gracekv.trees import CANDIDATES, SplitRule, cut_thresholds, grow, join

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def made(seed, lengths, units=2, floor_share=0.2, kind="relative"):
    """Random trees, and what they were made from."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    distortion = torch.rand(units, longest, tokens, generator=generator) * torch.arange(longest)[:, None]
    mass, value = (torch.rand(units, tokens, generator=generator).softmax(-1) for _ in range(2))
    floor = torch.rand(units, tokens, generator=generator) < floor_share
    strength = torch.randn(tokens, generator=generator)
    rule = SplitRule(0.05, kind)
    args = (distortion, mass, value, floor, lengths.cumsum(0) - lengths, lengths, strength)
    return grow(*args, cut_thresholds(strength, longest), rule), args


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), st.sampled_from(["relative", "absolute"]))
def test_a_tree_divides_its_slot_down_to_single_tokens(lengths, seed, kind):
    trees, (distortion, mass, value, floor, starts, slot_lengths, strength) = made(seed, lengths, kind=kind)
    thresholds = cut_thresholds(strength, int(slot_lengths.max()))
    costs = dict.fromkeys([(u, s) for u in range(2) for s in range(len(lengths))], 1)
    for node in range(len(trees)):
        u, a, b = (int(x[node]) for x in (trees.unit, trees.begin, trees.end))
        wanted = 0.0 if b - a == 1 else float(distortion[u, b - a - 1, a])
        assert b - a == 1 or float(trees.distortion[node]) == pytest.approx(wanted)
        children = range(int(trees.child[node]), int(trees.child[node]) + int(trees.cost[node]) + 1)
        if b - a == 1:
            assert trees.child[node] == -1
            assert trees.cost[node] == 0
            continue
        spans = [(int(trees.begin[c]), int(trees.end[c])) for c in children]
        assert all(int(trees.parent[c]) == node and int(trees.unit[c]) == u for c in children)
        assert spans[0][0] == a
        assert spans[-1][1] == b
        assert all(left[1] == right[0] for left, right in pairwise(spans))
        # Value is conserved: intervals divide intervals.
        parts = sum(float(value[u, x:y].double().sum()) for x, y in spans)
        assert parts == pytest.approx(float(value[u, a:b].double().sum()), rel=1e-12)
        slot = int((starts <= a).sum()) - 1
        costs[(u, slot)] += int(trees.cost[node])
        check_choice(node, trees, distortion, mass, value, floor, strength, thresholds, kind, spans)
    # Opening the tree and splitting everything costs as many entries as the slot has tokens.
    assert costs == {(u, s): lengths[s] for u in range(2) for s in range(len(lengths))}


def check_choice(node, trees, distortion, mass, value, floor, strength, thresholds, kind, spans):
    """The split is the best by its definition, or forced."""
    u, a, b = (int(x[node]) for x in (trees.unit, trees.begin, trees.end))

    def d(x, y):
        return float(distortion[u, y - x - 1, x]) if y - x > 1 else 0.0

    cuts = sorted(range(a + 1, b), key=lambda x: -float(strength[x]))[:CANDIDATES]
    low, high = min(float(strength[x]) for x in cuts), max(float(strength[x]) for x in cuts)
    weight = 0.05 * (1 if kind == "absolute" else d(a, b))
    best_cut = max(
        d(a, b) - d(a, x) - d(x, b) + weight * (float(strength[x]) - low) / max(high - low, 1e-30) for x in cuts
    )
    inside = floor[u, a:b]
    source = torch.where(inside, value[u, a:b], -1.0) if bool(inside.any()) else mass[u, a:b]
    p = a + int(source.argmax())
    cost = (p > a) + (p < b - 1)
    extraction = (d(a, b) - (d(a, p) if p > a else 0) - (d(p + 1, b) if p < b - 1 else 0)) / cost
    if bool(inside.any()) or extraction > best_cut + 1e-6:
        assert (p, p + 1) in spans
    elif extraction < best_cut - 1e-6:
        assert len(spans) == 2
        x = spans[0][1]
        gain = d(a, b) - d(a, x) - d(x, b) + weight * (float(strength[x]) - low) / max(high - low, 1e-30)
        assert gain == pytest.approx(best_cut, abs=1e-5)


def greedy(trees, mass, worth, budget, opened):
    """The auction without a heap: look at every action, buy the best that fits, drop what does not."""
    add = [max(0.0, float(worth[k] * (mass[k] - trees.distortion[k]))) for k in range(len(trees))]
    split = [max(0.0, float(worth[k] * trees.gain[k])) for k in range(len(trees))]
    state, gone, left = list(opened), set(), budget
    while left > 0:
        actions = []
        for k in range(len(trees)):
            if state[k] == UNREACHED and int(trees.parent[k]) < 0:
                actions.append((add[k], -k, 1))
            elif state[k] == FRONTIER and int(trees.cost[k]):
                actions.append((split[k] / int(trees.cost[k]), -k, int(trees.cost[k])))
        actions = [a for a in actions if -a[1] not in gone]
        if not actions:
            break
        _, node, cost = max(actions)
        node = -node
        if cost > left:
            gone.add(node)
            continue
        left -= cost
        if state[node] == UNREACHED:
            state[node] = FRONTIER
        else:
            state[node] = 2
            for child in range(int(trees.child[node]), int(trees.child[node]) + int(trees.cost[node]) + 1):
                state[child] = FRONTIER
    return state, budget - left


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 60), st.integers(0, 10**6))
def test_the_heap_is_the_greedy(lengths, budget, seed):
    trees, (_, mass, value, *_) = made(seed, lengths)
    of_node = torch.stack([mass[u, a:b].sum() for u, a, b in zip(trees.unit, trees.begin, trees.end, strict=True)])
    worth = torch.stack([value[u, a:b].sum() for u, a, b in zip(trees.unit, trees.begin, trees.end, strict=True)])
    auction = Auction.of(trees, of_node, worth)
    start = list(auction.state)
    spent = auction.run(budget)
    assert (auction.state, spent) == greedy(trees, of_node, worth, budget, start)
    assert spent <= budget
    assert spent == auction.state.count(FRONTIER)
    if budget >= 2 * sum(lengths):
        kept = torch.tensor(auction.state) == FRONTIER
        assert ((trees.end - trees.begin)[kept] == 1).all(), "a budget for everything keeps every token by itself"


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 30), st.integers(0, 10**6), st.sampled_from([float("inf"), 3]))
def test_the_floor_isolates_what_fits(lengths, budget, seed, cap):
    trees, (_, mass, *_) = made(seed, lengths)
    auction = Auction.of(trees, torch.rand(len(trees)), torch.rand(len(trees)))
    single = ((trees.end - trees.begin) == 1).nonzero()[:, 0].tolist()
    order = torch.randperm(len(single), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = [single[i] for i in order]
    spent = auction.realise(wanted, budget, cap)
    assert spent == auction.state.count(FRONTIER)
    assert spent <= budget
    kept = torch.tensor(auction.state) == FRONTIER
    solution = frontier(trees, kept, mass.shape)
    assert solution.count == spent
    for unit in range(2):
        assert int((trees.unit[kept] == unit).sum()) <= cap
    if budget >= 2 * sum(lengths) and cap > 100:
        assert all(auction.state[leaf] == FRONTIER for leaf in single)


def test_floor_candidates_are_the_definition():
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(3, 40, generator=generator) ** 6
    value = value / value.sum(-1, keepdim=True)
    rule = FloorRule(share=1.0, pool_width=3, consensus=0.5, threshold=1.2, mass=0.8)
    got = floor_candidates(value, 1000, rule)
    wanted = []
    for unit in range(3):
        blended = 0.5 * value[unit] + 0.5 * value.mean(0)
        f = [float(blended[max(0, t - 1) : t + 2].max()) for t in range(40)]
        held = 0.0
        for rank, t in enumerate(sorted(range(40), key=lambda t: (-f[t], t))):
            held += float(value[unit, t])
            if f[t] < 1.2 / 40 or held > 0.8:
                break
            wanted.append((rank, unit, t))
    assert got == [(unit, t) for _, unit, t in sorted(wanted)]
    fewer = floor_candidates(value, 12, rule)
    counts = [sum(u == unit for u, _ in fewer) for unit in range(3)]
    everything = [sum(u == unit for u, _ in got) for unit in range(3)]
    assert counts == [max(1, n * 12 // sum(everything)) for n in everything]
    assert floor_candidates(value, 0, rule) == []


def test_trees_of_groups_join():
    first, _ = made(1, [5, 3])
    second, _ = made(2, [5, 3])
    both = join([first, second], [0, 2])
    assert both.unit.unique().tolist() == [0, 1, 2, 3]
    below = both.parent >= 0
    assert (both.unit[below] == both.unit[both.parent[below]]).all()
    assert torch.equal(both.gain, torch.cat([first.gain, second.gain]))
