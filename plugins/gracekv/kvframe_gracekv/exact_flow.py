"""One budget over all layers, heads and resolutions, spent exactly."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.ops import interval_sums
from kvframe.stages import Allocator
from kvframe.types import Needs, Observation, Plan, Segments
from kvframe_gracekv.entries import PlanBuilder
from kvframe_gracekv.partition import Slots, Solution, solve_within
from kvframe_gracekv.rows import Row, check_consecutive, rows
from kvframe_gracekv.sensitivity import Sensitivity, head_sensitivity
from kvframe_gracekv.tables import Loss, layer_tables

NO_QUESTION = "no question is marked (suffix_length), so the end of the prompt stands for what will be asked"


class ExactFlow(Allocator):
    """For a price per entry, the best partition of every segment into merged intervals, single tokens and dropped
    tokens, by dynamic programming; the price is the lowest one at which all layers and heads together meet the budget.

        cost = sum over entries of (loss + price) + sum over dropped tokens of their loss
        loss of a dropped token = omega * score        (`loss: mass`: omega * the probes' attention on it)
        loss of an entry = omega * score of its tokens * distortion / mass  (`loss: mass`: omega * distortion)

    omega is the sensitivity of the head. What is left when the price jumps over the budget is spent on the dropped
    tokens of highest loss, then on splitting entries. Entries merge neighbours of one segment only. Source: own; it
    replaces the trees, the floor and the heap of GraceKV by an exact solution over all intervals of at most `longest`
    tokens."""

    paper: ClassVar[str] = "own, after Tian et al., 2026, arXiv 2608.07001"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    name: Literal["gracekv.exact_flow"] = "gracekv.exact_flow"
    longest: int = Field(32, ge=1, le=1024, description="Tokens in an entry at most; 1 = no merging.")
    loss: Literal["score", "mass"] = Field(
        "score", description="What a token is worth: the scorer's value, or the attention that the probes give it."
    )
    probes: int = Field(
        16, ge=1, description="Queries at the end of the prompt by which distortion is judged; 16 do as well as 48."
    )
    mass_share: float = Field(
        0.25, ge=0, le=1, description="Share of the error in attention mass; the rest is the error in the output."
    )
    value_base: float = Field(
        0.1, ge=0, description="Uniform part of the weights of merged values, relative to their mean score."
    )
    multiplicity: Literal["coherent", "count"] = Field(
        "coherent", description="coherent = n c^2 with the coherence c of the keys (the paper's); count = n."
    )
    sensitivity: Sensitivity = Field(
        "static_input", description="Weight of a head: by its output weights and what it writes, by the weights, or 1."
    )
    steps: int = Field(24, ge=1, description="Prices tried at most.")

    @property
    def needs(self) -> Needs:
        """The last queries, and the heads' outputs if they weigh the heads."""
        return Needs(queries=self.probes, head_outputs=48 if self.sensitivity == "static_input" else 0)

    @property
    def _loss(self) -> Loss:
        return Loss(self.mass_share, self.value_base, self.multiplicity == "coherent")

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of at most `budget [B]` entries, and of exactly the body if that is smaller."""
        builder = PlanBuilder(observation, scores, self._loss)
        asked = True
        for row in rows(observation, 32, 16):
            if not len(row.body):
                continue
            check_consecutive(observation, row, self.name)
            asked &= row.asked
            solution = self._row(observation, segments, scores, row, int(budget[row.index]))
            shape = (observation.model.layers, observation.model.kv_heads, -1)
            builder.add(row, solution.begins.view(shape), solution.dropped.view(shape))
        return builder.build(() if asked else (NO_QUESTION,))

    def _row(self, observation: Observation, segments: Segments, scores: Tensor, row: Row, budget: int) -> Solution:
        layers, heads = observation.model.layers, observation.model.kv_heads
        score = scores[:, row.index][..., row.body]  # [L, H, N]
        omega = head_sensitivity(observation, row, self.sensitivity, self.name)
        lengths = torch.unique_consecutive(segments.ids[row.index, row.body], return_counts=True)[1].cpu()
        drops = (score * omega[..., None]).flatten(0, 1)  # [U, N]
        # The probes' attention on a head's tokens sums to 1, and so does omega over the heads on average.
        typical = float(drops.mean()) if self.loss == "score" else 1 / len(row.body)
        slots = Slots(lengths, layers * heads, self.longest, row.body.device, typical or 1.0)
        for layer, table in layer_tables(observation, row, score, slots.longest, self.probes, self._loss, self.name):
            units = slice(layer * heads, (layer + 1) * heads)
            weight = omega[layer][:, None]
            if self.loss == "mass":
                drops[units] = table.mass * weight
                losses = table.distortion * weight[..., None]
            else:
                mass = interval_sums(table.mass, table.distortion.shape[1]).clamp_min_(1e-30)
                losses = interval_sums(drops[units], table.distortion.shape[1]).div_(mass).mul_(table.distortion)
                losses[:, 0] = 0
            slots.fill(units, losses, drops[units])
        guess = float(drops.flatten().topk(max(1, min(budget, drops.numel()))).values[-1])
        solution = solve_within(slots, budget, guess, self.steps)
        return spend_rest(solution, drops, budget)


def spend_rest(solution: Solution, drops: Tensor, budget: int) -> Solution:
    """Keep the dropped tokens of highest loss `drops [U, N]` with what is left of the budget; if none is dropped any
    more, split the smallest entries into their tokens."""
    left = budget - solution.count
    begins, dropped = solution.begins.clone(), solution.dropped.clone()
    missing = dropped.flatten().nonzero()[:, 0]
    best = drops.flatten()[missing].argsort(descending=True, stable=True)[: max(0, left)]
    begins.view(-1)[missing[best]] = True
    dropped.view(-1)[missing[best]] = False
    left -= len(best)
    if left > 0:
        entry = begins.flatten().cumsum(0) - 1
        size = torch.bincount(entry, minlength=int(begins.sum()))
        order = size.argsort(stable=True)
        fits = (size[order] - 1).cumsum(0) <= left
        split = torch.zeros(len(size), dtype=torch.bool, device=size.device)
        split[order[fits]] = True
        begins |= split[entry].view_as(begins) & ~dropped
    return Solution(begins, dropped)
