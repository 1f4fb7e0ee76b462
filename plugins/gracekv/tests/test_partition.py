"""The exact partition against an exhaustive search, and the price against every budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe_gracekv.exact_flow import spend_rest
from kvframe_gracekv.partition import Slots, solve_within


def partitions(n, longest):
    """Every partition of n tokens: a list of (length, kept) blocks; dropped blocks are single tokens."""
    if n == 0:
        yield []
        return
    for rest in partitions(n - 1, longest):
        yield [(1, False), *rest]
    for length in range(1, min(n, longest) + 1):
        for rest in partitions(n - length, longest):
            yield [(length, True), *rest]


def made(seed, lengths, units, longest):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    losses = torch.rand(units, longest, tokens, generator=generator) * torch.arange(longest)[:, None] / 4
    drops = torch.rand(units, tokens, generator=generator)
    slots = Slots(torch.tensor(lengths), units, longest, torch.device("cpu"))
    half = units // 2
    for now in (slice(0, half), slice(half, units)):
        slots.fill(now, losses[now], drops[now])
    return slots, losses, drops


def cost_of(solution, losses, drops, price):
    """The cost of a partition, from its definition; and its entries."""
    total, count = 0.0, 0
    for unit in range(len(drops)):
        begin = None
        for token in range(drops.shape[1] + 1):
            last = token == drops.shape[1]
            if begin is not None and (last or solution.begins[unit, token] or solution.dropped[unit, token]):
                total += float(losses[unit, token - begin - 1, begin]) + price
                count, begin = count + 1, None
            if not last and solution.dropped[unit, token]:
                total += float(drops[unit, token])
            elif not last and solution.begins[unit, token]:
                begin = token
    return total, count


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 7),
    st.floats(0, 1.5),
    st.integers(0, 10**6),
)
def test_the_partition_is_the_best_of_all_at_every_price(lengths, units, longest, price, seed):
    slots, losses, drops = made(seed, lengths, units, longest)
    count, choices = slots.solve(price)
    solution = slots.trace(choices)
    cost, entries = cost_of(solution, losses, drops, price)
    assert entries == count == solution.count
    best = 0.0
    for unit in range(units):
        start = 0
        for n in lengths:
            costs = []
            for blocks in partitions(n, min(longest, n)):
                at, value = start, 0.0
                for length, kept in blocks:
                    value += float(losses[unit, length - 1, at]) + price if kept else float(drops[unit, at])
                    at += length
                costs.append(value)
            best += min(costs)
            start += n
    # Losses are held in fp16: with errors of 2^-11 the best by them costs at most 1 + 2^-10 times the best.
    assert cost == pytest.approx(best, rel=2**-9, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 10**6)
)
def test_every_budget_is_kept_and_spent(lengths, units, budget, seed):
    slots, _, drops = made(seed, lengths, units, 5)
    solution = solve_within(slots, budget, float(drops.median()), 24)
    assert solution.count <= budget
    assert not (solution.begins & solution.dropped).any()
    full = spend_rest(solution, drops, budget)
    assert full.count == min(budget, drops.numel()) or not full.dropped.any()
    assert full.count <= budget


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_a_higher_price_never_buys_more(seed):
    slots, _, _ = made(seed, [7, 3, 9], 3, 5)
    counts = [slots.solve(price)[0] for price in (0.0, 0.01, 0.1, 0.3, 1.0, 3.0, 100.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
