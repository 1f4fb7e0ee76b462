"""Every allocator against a readable reference, and the laws of allocators."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvframe.builtin.segmenters import Chunks
from kvframe.execute import check_plan
from kvframe.stages import Allocator
from kvframe.types import Observation, Plan, Segments
from kvframe_baselines import Ada, Chunk, GlobalTopK, Pyramid

SETTINGS = settings(max_examples=40, deadline=None)
ALLOCATORS: list[Allocator] = [
    Pyramid(),
    Pyramid(beta=1),
    Pyramid(beta=3),
    Ada(),
    Ada(floor=0),
    Ada(floor=1),
    Chunk(),
    GlobalTopK(),
    GlobalTopK(floor=0.3),
]


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Arguments of `make_prompts`, a seed for scores, whether scores tie, a share of the budget for each row."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 7, 33, 65]), min_size=1, max_size=3))
    return {
        "shape": {
            "seed": 0,
            "lengths": lengths,
            "layers": draw(st.sampled_from([1, 2, 5])),
            "heads": draw(st.sampled_from([1, 2, 3])),
            "group": 1,
            "dim": 2,
            "sink": draw(st.sampled_from([0, 4])),
            "recent": draw(st.sampled_from([0, 3])),
        },
        "seed": draw(st.integers(0, 2**31)),
        "ties": draw(st.booleans()),
        "shares": draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths))),
        "chunk": draw(st.sampled_from([1, 3, 20])),
    }


def draw_scores(observation: Observation, columns: list[Tensor], seed: int, ties: bool) -> Tensor:
    """Scores that depend on the row's tokens only, not on the padding; 0 outside the body."""
    layers, batch, heads, _ = observation.shape
    scores = torch.zeros(observation.shape)
    for row in range(batch):
        generator = torch.Generator().manual_seed(seed + row)
        drawn = torch.rand(layers, heads, len(columns[row]), generator=generator)
        drawn = drawn * torch.rand(layers, heads, 1, generator=generator)
        # Multiples of 1/64 or 1/4096 add up without rounding, so that the reference sees the same order.
        steps = 64 if ties else 4096
        scores[:, row][..., columns[row]] = (drawn * steps).round() / steps
    return scores * observation.body[None, :, None]


def set_up(case: dict, make_prompts, extra: int = 0) -> tuple[Observation, list[Tensor], Segments, Tensor, Tensor]:
    prompts = make_prompts(**case["shape"])
    observation, columns = prompts.left_padded(extra)
    scores = draw_scores(observation, columns, case["seed"], case["ties"])
    full = observation.shape[0] * observation.shape[2] * observation.body.sum(1)
    budget = full * torch.tensor(case["shares"]) // 1000
    return observation, columns, Chunks(size=case["chunk"]).segment(observation), scores, budget


def kept_by(plan: Plan) -> Tensor:
    """bool `[L, B, H, T]`."""
    return torch.stack([layer.assignment >= 0 for layer in plan.layers])


def reference(
    allocator: Allocator, scores: Tensor, body: Tensor, ids: Tensor, budget: int
) -> set[tuple[int, int, int]]:
    """(layer, head, token) that one row keeps; `scores [L, H, T]`, `body`, `ids [T]`."""
    layers, heads, _ = scores.shape
    tokens = [t for t in range(len(body)) if body[t]]
    units = [(layer, head) for layer in range(layers) for head in range(heads)]
    score = {(*unit, t): float(scores[*unit, t]) for unit in units for t in tokens}

    def best(candidates, count: int) -> list:
        return sorted(candidates, key=lambda c: (-score[c], c))[:count]

    def share(candidates, units, total: int, floor: float) -> set:
        safe = int(floor * total / len(units))
        kept = {c for unit in units for c in best([x for x in candidates if x[:2] == unit], safe)}
        return kept | set(best([c for c in candidates if c not in kept], total - len(kept)))

    if isinstance(allocator, Ada):
        kept = set()
        for layer in range(layers):
            total = budget // layers + (layer < budget % layers)
            mine = [unit for unit in units if unit[0] == layer]
            kept |= share([c for c in score if c[0] == layer], mine, total, allocator.floor)
        return kept
    if isinstance(allocator, GlobalTopK):
        return share(list(score), units, budget, allocator.floor)
    if isinstance(allocator, Chunk):
        kept = set()
        for layer in range(layers):
            total = {t: sum(score[layer, h, t] for h in range(heads)) for t in tokens}
            chunks: dict[int, list[int]] = {}
            for t in tokens:
                chunks.setdefault(int(ids[t]), []).append(t)
            order = sorted(chunks, key=lambda c: (-sum(total[t] for t in chunks[c]) / len(chunks[c]), c))
            in_order = [t for c in order for t in sorted(chunks[c], key=lambda t: (-total[t], t))]
            kept |= {(layer, h, t) for t in in_order[: budget // (layers * heads)] for h in range(heads)}
        return kept
    raise TypeError(allocator)


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)
@SETTINGS
@given(case=cases())
def test_plan_is_valid_and_within_budget(allocator: Allocator, case: dict, make_prompts) -> None:
    observation, _, segments, scores, budget = set_up(case, make_prompts)
    before = scores.clone()
    plan = allocator.allocate(observation, segments, scores, budget)
    assert torch.equal(scores, before)
    check_plan(plan, observation, budget, allocator.name)
    layers, _, heads, _ = observation.shape
    # What may stay unspent is what each docstring says.
    unit = {Pyramid: heads, Chunk: layers * heads}.get(type(allocator), 1)
    spent = sum(layer.n_entries.sum(1) for layer in plan.layers)
    assert torch.equal(spent, budget // unit * unit)
    if not allocator.ragged:
        assert all((layer.assignment == layer.assignment[:, :1]).all() for layer in plan.layers)


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)
@SETTINGS
@given(case=cases())
def test_ratio_1_keeps_everything(allocator: Allocator, case: dict, make_prompts) -> None:
    observation, _, segments, scores, budget = set_up({**case, "shares": [1000] * len(case["shares"])}, make_prompts)
    kept = kept_by(allocator.allocate(observation, segments, scores, budget))
    assert torch.equal(kept, observation.body[None, :, None].expand_as(kept))


@pytest.mark.parametrize("allocator", [a for a in ALLOCATORS if not isinstance(a, Pyramid)], ids=repr)
@SETTINGS
@given(case=cases())
def test_matches_the_reference(allocator: Allocator, case: dict, make_prompts) -> None:
    observation, _, segments, scores, budget = set_up(case, make_prompts)
    kept = kept_by(allocator.allocate(observation, segments, scores, budget))
    for row in range(len(budget)):
        wanted = reference(allocator, scores[:, row], observation.body[row], segments.ids[row], int(budget[row]))
        assert {tuple(c) for c in kept[:, row].nonzero().tolist()} == wanted


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)
@SETTINGS
@given(case=cases(), extra=st.integers(0, 9))
def test_row_alone_is_row_in_a_batch(allocator: Allocator, case: dict, extra: int, make_prompts) -> None:
    observation, columns, segments, scores, budget = set_up(case, make_prompts, extra)
    kept = kept_by(allocator.allocate(observation, segments, scores, budget))
    prompts = make_prompts(**case["shape"])
    for row in range(len(budget)):
        alone = prompts.alone(row)
        own = Chunks(size=case["chunk"]).segment(alone)
        plan = allocator.allocate(alone, own, scores[:, row : row + 1][..., columns[row]], budget[row : row + 1])
        assert torch.equal(kept_by(plan)[:, 0], kept[:, row][..., columns[row]])


@pytest.mark.parametrize("allocator", [Ada(floor=0), Chunk(), GlobalTopK()], ids=repr)
@SETTINGS
@given(case=cases(), more=st.integers(0, 20))
def test_a_larger_budget_keeps_a_superset(allocator: Allocator, case: dict, more: int, make_prompts) -> None:
    observation, _, segments, scores, budget = set_up(case, make_prompts)
    full = observation.shape[0] * observation.shape[2] * observation.body.sum(1)
    small = kept_by(allocator.allocate(observation, segments, scores, budget))
    large = kept_by(allocator.allocate(observation, segments, scores, torch.minimum(budget + more, full)))
    assert (large | ~small).all()


@pytest.mark.parametrize("beta", [1.0, 3.0, 20.0])
@SETTINGS
@given(case=cases(), more=st.integers(0, 20))
def test_a_larger_budget_costs_a_pyramid_layer_one_token_at_most(
    beta: float, case: dict, more: int, make_prompts
) -> None:
    observation, _, _, _, budget = set_up(case, make_prompts)
    pyramid = Pyramid(beta=beta)
    small, large = (pyramid.layer_counts(observation, b) for b in (budget, budget + more))
    assert (large >= small - 1).all()


@pytest.mark.parametrize("beta", [1.0, 3.0, 20.0])
@SETTINGS
@given(case=cases())
def test_pyramid_is_linear_in_depth(beta: float, case: dict, make_prompts) -> None:
    observation, _, segments, scores, budget = set_up(case, make_prompts)
    pyramid = Pyramid(beta=beta)
    counts = pyramid.layer_counts(observation, budget)
    layers, _, heads, _ = observation.shape
    for row in range(len(budget)):
        body, total = int(observation.body[row].sum()), int(budget[row]) // heads
        mean = Fraction(total, layers)
        first = min(2 * mean - mean / Fraction(beta), Fraction(body))
        last = 2 * mean - first
        mine = counts[:, row].tolist()
        assert sum(mine) == total
        assert mine == sorted(mine, reverse=True)
        assert all(0 <= count <= body for count in mine)
        for layer, count in enumerate(mine):
            exact = mean if layers == 1 else first - layer * (first - last) / (layers - 1)
            assert abs(count - exact) < 1 + Fraction(1, 10**6)
    kept = kept_by(pyramid.allocate(observation, segments, scores, budget))
    assert torch.equal(kept.sum(-1), counts[..., None].expand(*counts.shape, heads))
    # Within a head nothing that is dropped scores higher than what is kept.
    lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
    highest = scores.masked_fill(kept | ~observation.body[:, None], -torch.inf).amax(-1)
    assert (lowest >= highest).all()


def test_pyramid_in_numbers(make_prompts) -> None:
    observation, _ = make_prompts(0, [65], layers=3, heads=2, group=1).left_padded()
    # 20 a head on average: the last layer gets 20/20 = 1, the first 2 * 20 - 1 = 39.
    assert Pyramid().layer_counts(observation, torch.tensor([120])).flatten().tolist() == [39, 20, 1]
    # 40 a head: the first layer cannot hold 78, so it keeps all 65 and the last one 2 * 40 - 65 = 15.
    assert Pyramid().layer_counts(observation, torch.tensor([240])).flatten().tolist() == [65, 40, 15]


@pytest.mark.parametrize("allocator", [Ada(), GlobalTopK(), GlobalTopK(floor=0.3)], ids=repr)
def test_ragged_is_really_ragged_above_the_floor(allocator: Allocator, make_prompts, whole) -> None:
    observation, _ = make_prompts(0, [65], layers=2, heads=3, group=1).left_padded()
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(observation.shape, generator=generator) * torch.tensor([0.01, 0.1, 1.0])[:, None]
    budget = torch.tensor([2 * 3 * 16])
    plan = allocator.allocate(observation, whole(observation), scores, budget)
    counts = torch.stack([layer.n_entries for layer in plan.layers])[:, 0]  # [L, H]
    assert (counts[:, 0] < counts[:, 2]).all()
    assert (counts >= int(allocator.floor * 16)).all()
    if isinstance(allocator, Ada):
        assert counts.sum(1).tolist() == [48, 48]


def test_chunk_keeps_whole_chunks_and_cuts_the_last_by_score(make_prompts) -> None:
    observation, _ = make_prompts(0, [9], layers=1, heads=1, group=1).left_padded()
    scores = torch.tensor([5.0, 0, 4, 9, 9, 9, 1, 2, 3]).view(1, 1, 1, 9)
    plan = Chunk().allocate(observation, Chunks(size=3).segment(observation), scores, torch.tensor([5]))
    assert kept_by(plan)[0, 0, 0].tolist() == [True, False, True, True, True, True, False, False, False]
