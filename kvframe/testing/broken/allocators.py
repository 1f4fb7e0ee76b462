"""Broken allocators."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvframe.builtin.allocators import TopK
from kvframe.builtin.graded import Graded
from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import Grades, LayerPlan, Observation, Plan, Segments


def top(observation: Observation, scores: Tensor, count: Tensor) -> Plan:
    """Keep the `count [B]` best tokens of every head."""
    kept = select_top(scores, count[None, :, None], observation.body[None, :, None])
    return Plan(tuple(LayerPlan.keep(mask) for mask in kept))


def share(observation: Observation, budget: Tensor) -> Tensor:
    """Entries for each head, `[B]`."""
    return budget // (observation.shape[0] * observation.shape[2])


def runs(observation: Observation, budget: Tensor) -> Plan:
    """Merge the body's tokens into as many runs of neighbours as the budget allows, the same in all heads: right."""
    count, body = share(observation, budget), observation.body.sum(1)
    place = observation.body.cumsum(1) - 1
    run = place * count[:, None] // body.clamp_min(1)[:, None]
    run = torch.where(observation.body & (count > 0)[:, None], run, -1).int()
    _, batch, heads, tokens = observation.shape
    layer = LayerPlan(run[:, None].expand(batch, heads, tokens), count[:, None].expand(batch, heads).clone())
    return Plan((layer,) * len(observation.layers))


def sizes(layer: LayerPlan) -> Tensor:
    """Tokens of each entry, fp32 `[N]`."""
    counted = [
        torch.bincount(ids[ids >= 0].long(), minlength=int(n))
        for ids, n in zip(layer.assignment.flatten(0, 1), layer.n_entries.flatten(), strict=True)
    ]
    return torch.cat(counted).float()


class Gaps(Allocator):
    """Uses token numbers as entry numbers, so that some entries have no token."""

    name: Literal["broken.gaps"] = "broken.gaps"
    merges: ClassVar[bool] = False
    breaks: ClassVar = ("plans_are_valid", "entries_are_single_as_declared")

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan with holes."""
        plan = top(observation, scores, share(observation, budget))
        numbers = (observation.body.cumsum(1) - 1).int()[:, None]
        return Plan(tuple(replace(p, assignment=torch.where(p.assignment >= 0, numbers, -1)) for p in plan.layers))


class RoundsUp(Allocator):
    """Gives every head a whole number of entries, rounded up."""

    name: Literal["broken.rounds_up"] = "broken.rounds_up"
    merges: ClassVar[bool] = False
    breaks: ClassVar = ("budget_is_respected",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan that is a little too large."""
        return top(observation, scores, -(-budget // (observation.shape[0] * observation.shape[2])))


class DropsOne(Allocator):
    """Never keeps the last token that it could."""

    name: Literal["broken.drops_one"] = "broken.drops_one"
    merges: ClassVar[bool] = False
    breaks: ClassVar = ("full_budget_is_the_identity",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of one entry a head less."""
        return top(observation, scores, (share(observation, budget) - 1).clamp_min(0))


class Sums(Allocator):
    """Adds the keys of a run up instead of averaging them."""

    name: Literal["broken.sums"] = "broken.sums"
    breaks: ClassVar = ("weights_sum_to_one",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return runs of weight 1 a token."""
        plan = runs(observation, budget)
        ones = torch.ones(observation.shape[1:])
        return Plan(tuple(replace(layer, key_weight=ones) for layer in plan.layers))


class CountsDouble(Allocator):
    """Says that an entry of several tokens stands for twice as many."""

    name: Literal["broken.counts_double"] = "broken.counts_double"
    breaks: ClassVar = ("multiplicity_counts_tokens",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return runs with wrong multiplicities."""
        plan = runs(observation, budget)
        count = sizes(plan.layers[0])
        return Plan(tuple(replace(p, multiplicity=torch.where(count > 1, 2 * count, count)) for p in plan.layers))


class Misplaced(Allocator):
    """Puts an entry of several tokens behind the whole text."""

    name: Literal["broken.misplaced"] = "broken.misplaced"
    breaks: ClassVar = ("entries_stand_among_their_tokens",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return runs at wrong positions; single tokens stay where they are."""
        plan = runs(observation, budget)
        layer = plan.layers[0]
        at = observation.positions[:, None].expand(observation.shape[1:]).flatten(0, 1)
        first = [
            at[pair][layer.assignment.flatten(0, 1)[pair] == entry].min()
            for pair, n in enumerate(layer.n_entries.flatten().tolist())
            for entry in range(n)
        ]
        place = torch.stack(first) if first else torch.zeros(0, dtype=torch.int64)
        place = torch.where(sizes(layer) > 1, 1000, place).int()
        return Plan(tuple(replace(p, positions=place) for p in plan.layers))


class DisagreesSecretly(TopK):
    """Keeps other tokens in each head, but declares `ragged = False`."""

    name: Literal["broken.disagrees_secretly"] = "broken.disagrees_secretly"  # type: ignore[assignment]
    ragged: ClassVar[bool] = False
    breaks: ClassVar = ("heads_agree_as_declared",)


class CountsEntries(Graded):
    """Spends a budget of the dearest grade's entries as if all of them cost as much as the cheapest."""

    name: Literal["broken.counts_entries"] = "broken.counts_entries"  # type: ignore[assignment]
    breaks: ClassVar = ("grades_stay_within_budget",)

    def allocate_graded(
        self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor, grades: Grades
    ) -> Plan:
        """Return a plan within a budget counted too cheaply."""
        cheap = replace(grades, price=tuple(price * grades.price[0] for price in grades.price))
        return super().allocate_graded(observation, segments, scores, budget, cheap)


class MergesSecretly(Allocator):
    """Merges, but declares `merges = False`: no room is kept for multiplicities."""

    name: Literal["broken.merges_secretly"] = "broken.merges_secretly"
    merges: ClassVar[bool] = False
    breaks: ClassVar = ("entries_are_single_as_declared",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return runs."""
        return runs(observation, budget)


class DropsSecretly(TopK):
    """Drops tokens, but declares `keeps_all = True`."""

    name: Literal["broken.drops_secretly"] = "broken.drops_secretly"  # type: ignore[assignment]
    keeps_all: ClassVar[bool] = True
    breaks: ClassVar = ("everything_is_kept_as_declared",)


class NeedsTheStart(TopK):
    """Takes positions for columns, which holds for the first prompt only, but declares `streams = True`."""

    name: Literal["broken.needs_the_start"] = "broken.needs_the_start"  # type: ignore[assignment]
    breaks: ClassVar = ("blocks_are_allocated_as_declared",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens, looked up by position."""
        at = observation.positions.expand(*scores.shape[:1], -1, -1)[:, :, None].expand(scores.shape)
        scores.gather(-1, at)
        return super().allocate(observation, segments, scores, budget)


class AllOrNothing(Allocator):
    """Spends a budget only if it divides evenly."""

    name: Literal["broken.all_or_nothing"] = "broken.all_or_nothing"
    merges: ClassVar[bool] = False
    breaks: ClassVar = ("more_budget_keeps_no_fewer",)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens, or nothing."""
        units = observation.shape[0] * observation.shape[2]
        return top(observation, scores, torch.where(budget % units == 0, budget // units, 0))
