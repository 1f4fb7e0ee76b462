"""Cutting entries into chunks and sides, and ranking edges, against loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe_centroidkv.partition import places, scramble, split_chunks
from kvframe_centroidkv.ranking import highest

RUNS = st.lists(st.integers(1, 9), max_size=6)


def labels(runs: list[int]) -> torch.Tensor:
    return torch.tensor([3 * i + 1 for i, n in enumerate(runs) for _ in range(n)], dtype=torch.long)


@given(RUNS)
def test_places(runs):
    run, place, length = places(labels(runs))
    assert run.tolist() == [i for i, n in enumerate(runs) for _ in range(n)]
    assert place.tolist() == [j for n in runs for j in range(n)]
    assert length.tolist() == runs


@given(runs=RUNS, partition=st.sampled_from(["alternating", "halves", "random"]), seed=st.integers(0, 99))
def test_split_chunks_is_a_loop(runs, partition, seed):
    label = labels(runs)
    draw = scramble(seed, 0, label, torch.arange(len(label)))
    sides = split_chunks(label, partition, draw)
    begin = 0
    for chunk, n in enumerate(runs):
        items = list(range(begin, begin + n))
        begin += n
        if partition == "random":
            items.sort(key=lambda i: int(draw[i]))
        if partition == "halves":
            sources, targets = items[: n // 2], items[n // 2 :]
        else:
            sources, targets = items[0::2], items[1::2]
        for side, wanted in ((sides.sources, sources), (sides.targets, targets)):
            assert side[chunk].tolist() == wanted + [-1] * (side.shape[1] - len(wanted))


@settings(max_examples=20)
@given(st.integers(0, 2**31 - 1), st.integers(0, 20))
def test_scramble_is_spread_and_depends_on_all_its_arguments(seed, turn):
    ranks = torch.arange(4096)
    unit = torch.full_like(ranks, 5)
    drawn = scramble(seed, turn, unit, ranks)
    assert len(drawn.unique()) == len(drawn)
    # A fair coin of 4096 throws is further than 6 standard deviations (192) off once in 5e8.
    assert abs(int((drawn > 0).sum()) - 2048) < 192
    order = drawn.argsort()
    assert abs(int((order[:2048] % 2).sum()) - 1024) < 192
    for other in (
        scramble(seed + 1, turn, unit, ranks),
        scramble(seed, turn + 1, unit, ranks),
        scramble(seed, turn, unit + 1, ranks),
    ):
        assert not torch.equal(other.argsort(), order)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30),
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
)
def test_highest_is_a_sort(edges, quota):
    values = torch.tensor([v / 5 for v, _ in edges])
    group = torch.tensor([g for _, g in edges], dtype=torch.long)
    chosen = highest(values, group, torch.tensor(quota)).nonzero().flatten().tolist()
    wanted = []
    for g, count in enumerate(quota):
        mine = [i for i, (_, own) in enumerate(edges) if own == g]
        wanted += sorted(mine, key=lambda i: (-edges[i][0], i))[:count]
    assert chosen == sorted(wanted)


def test_highest_takes_rounding_for_a_tie():
    values = torch.tensor([0.5, 0.5 + 2**-23, 0.5 + 2**-10, -0.25, -0.25 + 2**-24])
    assert highest(values, torch.zeros(5).long(), torch.tensor([2])).tolist() == [True, False, True, False, False]
    assert highest(values, torch.zeros(5).long(), torch.tensor([4])).tolist() == [True, True, True, True, False]
