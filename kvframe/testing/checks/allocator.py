"""Laws of allocators."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvframe.contracts import check_plan_fields
from kvframe.execute import check_plan, execute
from kvframe.testing.case import Case, arguments, cases_for, invoke
from kvframe.testing.law import expect, law
from kvframe.testing.numerics import FP32, sum_tolerance
from kvframe.types import Grades, LayerPlan, Plan

PLENTY = 1 << 32


def _cases(stage: Any) -> Any:
    return cases_for(stage, contents=("random", "constant", "zero"))


def _blocks(stage: Any) -> Any:
    return cases_for(stage, starts=(0, 1, 100), lengths=(1, 4, 7, 16))


def _graded(stage: Any) -> Any:
    offers = st.sampled_from([(0.25, 0.5, 1.0), (0.3, 1.0)])
    blocks = st.sampled_from([1, 4, 32])
    return st.tuples(cases_for(stage), st.builds(_grades, offers, blocks))


def _grades(price: tuple[float, ...], block: int) -> Grades:
    return Grades(price, torch.tensor([[0.25**number for number in range(1, len(price) + 1)]]), block)


def _two_budgets(stage: Any) -> Any:
    return st.tuples(cases_for(stage), st.integers(1, 8))


def _not_ragged(stage: Any) -> bool:
    return bool(stage.agrees)


def _not_merging(stage: Any) -> bool:
    return not stage.merges


def _merging(stage: Any) -> bool:
    return bool(stage.merges)


def _streaming(stage: Any) -> bool:
    return bool(stage.streams)


def _grading(stage: Any) -> bool:
    return bool(stage.chooses_grades)


def _spending(stage: Any) -> bool:
    return not stage.keeps_all


def spent(plan: Plan) -> Tensor:
    """Entries of each row over all layers and heads, `[B]`."""
    return torch.stack([layer.n_entries.sum(-1) for layer in plan.layers]).sum(0)


def group_sizes(layer: LayerPlan) -> Tensor:
    """Tokens of each entry, int64 `[N]`."""
    offsets = layer.n_entries.reshape(-1).cumsum(0) - layer.n_entries.reshape(-1)
    flat = layer.assignment.flatten(0, 1).long()
    kept = flat >= 0
    return torch.bincount((flat + offsets[:, None])[kept], minlength=int(layer.n_entries.sum()))


def entry_sums(layer: LayerPlan, weight: Tensor) -> Tensor:
    """The weights of each entry's tokens, added up, fp64 `[N]`."""
    offsets = layer.n_entries.reshape(-1).cumsum(0) - layer.n_entries.reshape(-1)
    flat = layer.assignment.flatten(0, 1).long()
    kept = flat >= 0
    total = torch.zeros(int(layer.n_entries.sum()), dtype=torch.float64)
    return total.index_add_(0, (flat + offsets[:, None])[kept], weight.flatten(0, 1)[kept].double())


def per_head(layer: LayerPlan) -> list[slice]:
    """Where the entries of each (b, h) stand among all."""
    ends = [0, *layer.n_entries.reshape(-1).cumsum(0).tolist()]
    return [slice(begin, end) for begin, end in pairwise(ends)]


@law("allocator", _cases)
def plans_are_valid(stage: Any, case: Case) -> None:
    """Entry ids of each head are 0..n-1, each with a token; only body tokens are assigned; shapes and dtypes fit."""
    given = arguments(stage, case)
    plan = invoke(stage, given)
    check_plan(plan, given[0], torch.full_like(case.budget, PLENTY), f"allocator '{stage.name}'")
    for layer in plan.layers:
        expect(layer.assignment.dtype == torch.int32, "assignments in int32", str(layer.assignment.dtype))
        expect(layer.n_entries.dtype == torch.int64, "n_entries in int64", str(layer.n_entries.dtype))


@law("allocator", _cases, applies=_spending)
def budget_is_respected(stage: Any, case: Case) -> None:
    """No row gets more entries than its budget, 0 included."""
    plan = invoke(stage, arguments(stage, case))
    expect((spent(plan) <= case.budget).all(), f"at most {case.budget.tolist()} entries", str(spent(plan).tolist()))


@law("allocator", _cases)
def full_budget_is_the_identity(stage: Any, case: Case) -> None:
    """With a budget for every body token each one is an entry of its own, unweighted and in its place."""
    case = replace(case, eighths=8)
    given = arguments(stage, case)
    seen = given[0]
    for index, layer in enumerate(invoke(stage, given).layers):
        kept = (layer.assignment >= 0) == seen.body[:, None]
        expect(kept.all(), "every body token kept", f"layer {index} without token {(~kept).nonzero()[:1].tolist()}")
        expect((group_sizes(layer) == 1).all(), "every entry a single token", f"groups in layer {index}")
        rope = seen.model.rope[index]
        made = execute(layer, seen.layers[index], seen.positions, rope)
        exact = execute(LayerPlan.keep(layer.assignment >= 0), seen.layers[index], seen.positions, rope)
        count = made.log_multiplicity
        expect(count is None or not count.any(), "multiplicity 1", f"exp of {count} in layer {index}")
        place = made.offsets.repeat_interleave(torch.cat([made.offsets.diff(), torch.zeros(1, dtype=torch.int64)]))
        order = (place * PLENTY + (torch.zeros(0) if made.positions is None else made.positions)).argsort()
        same = torch.equal(made.keys[order], exact.keys)
        expect(same, "the tokens' own keys, bit by bit", f"others in layer {index}")


@law("allocator", _cases, applies=_merging)
def weights_sum_to_one(stage: Any, case: Case) -> None:
    """Key and value weights of assigned tokens are >= 0 and add up to 1 over each entry."""
    for index, layer in enumerate(invoke(stage, arguments(stage, case)).layers):
        for name in ("key_weight", "value_weight"):
            if (weight := getattr(layer, name)) is None:
                continue
            expect((weight[layer.assignment >= 0] >= 0).all(), f"{name} >= 0", f"less in layer {index}")
            off = (entry_sums(layer, weight) - 1).abs()
            wrong = off[off > sum_tolerance(max(case.prompts.lengths), 1.0)]
            expect(not len(wrong), f"{name} that adds up to 1", f"errors of {wrong[:3].tolist()} in layer {index}")


@law("allocator", _cases, applies=_merging)
def multiplicity_counts_tokens(stage: Any, case: Case) -> None:
    """Multiplicities lie between 1 and the number of the entry's tokens."""
    for index, layer in enumerate(invoke(stage, arguments(stage, case)).layers):
        if (count := layer.multiplicity) is not None:
            sizes = group_sizes(layer)
            expect(count.shape == sizes.shape, f"one multiplicity for each of {len(sizes)} entries", str(count.shape))
            right = (count >= 1 - 8 * FP32) & (count <= sizes * (1 + 8 * FP32))
            expect(right.all(), "1 <= multiplicity <= tokens", f"{count[~right][:3]} of {sizes[~right][:3]} in {index}")


@law("allocator", _cases, applies=_merging)
def entries_stand_among_their_tokens(stage: Any, case: Case) -> None:
    """An entry's position lies between those of its first and its last token."""
    given = arguments(stage, case)
    at = given[0].positions
    for index, layer in enumerate(invoke(stage, given).layers):
        if (places := layer.positions) is None:
            continue
        expect(places.shape == group_sizes(layer).shape, "one position an entry", str(places.shape))
        entry = 0
        for pair, count in enumerate(layer.n_entries.reshape(-1).tolist()):
            row, head = divmod(pair, layer.n_entries.shape[1])
            for local in range(count):
                tokens = at[row][layer.assignment[row, head] == local]
                inside = int(tokens.min()) <= int(places[entry]) <= int(tokens.max())
                expect(inside, f"a position among {tokens.tolist()}", f"{int(places[entry])} in layer {index}")
                entry += 1


@law("allocator", _cases, applies=_not_ragged)
def heads_agree_as_declared(stage: Any, case: Case) -> None:
    """An allocator that `agrees` (by default one with `ragged = False`) gives all heads of a layer the same entries."""
    for index, layer in enumerate(invoke(stage, arguments(stage, case)).layers):
        same = (layer.assignment == layer.assignment[:, :1]).all()
        expect(same, "the same assignment in all heads", f"different ones in layer {index}; set ragged = True")


@law("allocator", _cases, applies=_not_merging)
def entries_are_single_as_declared(stage: Any, case: Case) -> None:
    """An allocator with `merges = False` makes entries of one token, of multiplicity 1."""
    for index, layer in enumerate(invoke(stage, arguments(stage, case)).layers):
        expect((group_sizes(layer) == 1).all(), "single tokens", f"a group in layer {index}; set merges = True")
        count = layer.multiplicity
        expect(count is None or (count == 1).all(), "multiplicity 1", f"{count} in layer {index}; set merges = True")


@law("allocator", _cases, applies=lambda stage: bool(stage.keeps_all))
def everything_is_kept_as_declared(stage: Any, case: Case) -> None:
    """An allocator with `keeps_all = True` keeps every body token, whatever the budget."""
    given = arguments(stage, case)
    for layer in invoke(stage, given).layers:
        expect(torch.equal(layer.assignment >= 0, given[0].body[:, None].expand(layer.assignment.shape)), "every token")


@law("allocator", _blocks, applies=_streaming)
def blocks_are_allocated_as_declared(stage: Any, case: Case) -> None:
    """An allocator with `streams = True` plans a block of tokens anywhere in the text, within the block's budget."""
    given = arguments(stage, case)
    limit = torch.full_like(case.budget, PLENTY) if stage.keeps_all else case.budget
    check_plan(invoke(stage, given), given[0], limit, f"allocator '{stage.name}'")


@law("allocator", _graded, applies=_grading)
def grades_stay_within_budget(stage: Any, drawn: tuple[Case, Grades]) -> None:
    """An allocator with `chooses_grades = True` says the grade of every entry, one of those that are offered, and what
    they cost, whole blocks, is within the budget."""
    case, grades = drawn
    given = arguments(stage, case)
    layers = len(given[0].layers)
    offered = replace(grades, error=grades.error.expand(layers, -1))
    plan = stage.allocate_graded(*given, offered)
    owner = f"allocator '{stage.name}'"
    check_plan_fields(plan, given[0], owner, offered)
    check_plan(plan, given[0], case.budget, owner, offered)
    if stage.agrees:
        for index, layer in enumerate(plan.layers):
            heads = layer.n_entries.shape[1]
            found = [[] if layer.grade is None else layer.grade[at].tolist() for at in per_head(layer)]
            same = all(grade == found[place - place % heads] for place, grade in enumerate(found))
            expect(same, "the same grades in all heads", f"different ones in layer {index}")


@law("allocator", _two_budgets)
def more_budget_keeps_no_fewer(stage: Any, drawn: tuple[Case, int]) -> None:
    """A larger budget, be it by a single entry, never leaves a row with fewer entries."""
    case, more = drawn
    given = [arguments(stage, replace(case, eighths=n)) for n in sorted((case.eighths, more))]
    *rest, budget = given[0]
    given.insert(1, (*rest, torch.minimum(budget + 1, given[1][-1])))
    counts = [spent(invoke(stage, each)) for each in given]
    for fewer, enough in pairwise(counts):
        expect((fewer <= enough).all(), f"at least {fewer.tolist()} entries", str(enough.tolist()))
