"""The paper's allocation: trees, a floor of exact tokens, and one auction over all layers and heads."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from kvframe.stages import Allocator
from kvframe.types import Needs, Observation, Plan, Segments
from kvframe_gracekv.auction import FRONTIER, Auction
from kvframe_gracekv.curvature import curvature
from kvframe_gracekv.entries import PlanBuilder
from kvframe_gracekv.exact_flow import NO_QUESTION
from kvframe_gracekv.floor import FloorRule, floor_candidates
from kvframe_gracekv.partition import Solution
from kvframe_gracekv.rows import Row, check_consecutive, rows
from kvframe_gracekv.segmenter import row_states
from kvframe_gracekv.sensitivity import Sensitivity, head_sensitivity
from kvframe_gracekv.tables import Loss, layer_tables
from kvframe_gracekv.trees import SplitRule, Trees, cut_thresholds, grow, join

# Numbers of the interval table held at a time (16 MiB of fp32), unless one layer has more.
_TABLE = 1 << 22


class BudgetFlow(Allocator):
    """GraceKV's allocator. Every segment of every head has a tree, from one entry for all its tokens down to single
    tokens. Entries are bought where they gain most per entry, over all layers and heads:

        Add (open a tree):    omega R(root) (mass(root) - D(root))            for 1 entry
        Split (into children): omega R(node) (D(node) - sum of D(children))   for children - 1 entries

    R = sum of the scores, D = distortion, mass = the probes' attention, omega = the head's sensitivity; gains below 0
    count as 0. Before that, up to `floor` of the budget isolates each head's best tokens. Trees split at the strongest
    cuts, or single out the token of highest mass. Source: Tian et al. 2026, budget flow."""

    paper: ClassVar[str] = "Tian et al., 2026, arXiv 2608.07001"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    name: Literal["gracekv.budget_flow"] = "gracekv.budget_flow"
    floor: float = Field(0.6, ge=0, le=1, description="Share of the budget for the singleton floor at most; 0 = none.")
    floor_pool: int = Field(7, ge=1, description="Tokens over which a floor score is the maximum, an odd number.")
    floor_consensus: float = Field(0.5, ge=0, le=1, description="Share of the mean over heads in a floor score.")
    floor_threshold: float = Field(1.2, ge=0, description="Floor score needed, in units of 1 / tokens.")
    floor_mass: float = Field(0.95, gt=0, le=1, description="Value that the floor tokens of a head hold at most.")
    floor_head_cap: float | None = Field(
        None, gt=0, description="Entries of one head's floor at most, relative to the mean head's share; null = no cap."
    )
    cuts: Literal["curvature", "boundary", "midpoint"] = Field(
        "curvature",
        description="Where trees may cut: by curvature (observes hidden states), by the segmenter's boundary strength, "
        "or in the middle.",
    )
    cut_bonus: float = Field(0.05, ge=0, description="Weight of a cut's strength (0 to 1 within the node) in its gain.")
    cut_bonus_kind: Literal["relative", "absolute"] = Field(
        "relative",
        description="relative = times the node's distortion; absolute = as the paper prints it, which outweighs the "
        "distortion wherever that is small.",
    )
    depths: tuple[float, ...] = Field((0.33, 0.5, 0.67), min_length=1, description="Depths for `cuts: curvature`.")
    scales: tuple[int, ...] = Field((4, 8, 16), min_length=1, description="Scales (tokens) for `cuts: curvature`.")
    stability: float = Field(0.25, ge=0, description="Weight of the spread over depths and scales in the curvature.")
    probes: int = Field(48, ge=1, description="Queries at the end of the prompt by which distortion is judged.")
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

    @field_validator("floor_pool")
    @classmethod
    def _odd(cls, width: int) -> int:
        if width % 2 == 0:
            raise ValueError(f"floor_pool must be odd so that the pool is centred; use {width - 1} or {width + 1}")
        return width

    @property
    def needs(self) -> Needs:
        """The last queries; the heads' outputs and hidden states if they are used."""
        return Needs(
            queries=max(48, self.probes),
            head_outputs=48 if self.sensitivity == "static_input" else 0,
            hidden_states=self.depths if self.cuts == "curvature" else (),
        )

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
        value = scores[:, row.index][..., row.body].flatten(0, 1)  # [U, N]
        rule = FloorRule(self.floor, self.floor_pool, self.floor_consensus, self.floor_threshold, self.floor_mass)
        candidates = floor_candidates(value, budget, rule)
        trees, mass = self._trees(observation, segments, row, scores, value, candidates)
        omega = head_sensitivity(observation, row, self.sensitivity, self.name).flatten()

        def over_node(tokens: Tensor) -> Tensor:
            sums = torch.nn.functional.pad(tokens.double().cumsum(-1), (1, 0))
            return (sums[trees.unit, trees.end] - sums[trees.unit, trees.begin]).float()

        auction = Auction.of(trees, over_node(mass), omega[trees.unit] * over_node(value))
        leaf = torch.full(value.shape, -1, device=value.device)
        single = trees.end - trees.begin == 1
        leaf[trees.unit[single], trees.begin[single]] = single.nonzero()[:, 0]
        leaves = leaf.tolist()
        cap = int(self.floor * budget)
        head_cap = float("inf") if self.floor_head_cap is None else self.floor_head_cap * cap / len(value)
        spent = auction.realise([leaves[u][t] for u, t in candidates], cap, head_cap)
        auction.run(budget - spent)
        return frontier(trees, torch.tensor(auction.state, device=value.device) == FRONTIER, value.shape)

    def _trees(
        self,
        observation: Observation,
        segments: Segments,
        row: Row,
        scores: Tensor,
        value: Tensor,
        candidates: list[tuple[int, int]],
    ) -> tuple[Trees, Tensor]:
        """`(trees, mass [U, N])`, built for a few layers at a time."""
        layers, heads = observation.model.layers, observation.model.kv_heads
        lengths = torch.unique_consecutive(segments.ids[row.index, row.body], return_counts=True)[1]
        starts, longest = lengths.cumsum(0) - lengths, int(lengths.max())
        strength = self._strength(observation, segments, row)
        if strength is None:
            # No cut reaches infinity, which leaves the midpoint.
            strength, thresholds = value.new_zeros(value.shape[1]), value.new_full((longest, value.shape[1]), torch.inf)
        else:
            thresholds = cut_thresholds(strength, longest)
        floor = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
        if candidates:
            unit, token = torch.tensor(candidates, device=value.device).T
            floor[unit, token] = True
        at_once = max(1, _TABLE // (heads * longest * len(row.body)))
        rule = SplitRule(self.cut_bonus, self.cut_bonus_kind)
        parts, firsts, masses, held = [], [], [], []
        tables = layer_tables(
            observation, row, scores[:, row.index][..., row.body], longest, self.probes, self._loss, self.name
        )
        for layer, table in tables:
            held.append(table.distortion)
            masses.append(table.mass)
            if len(held) < at_once and layer + 1 < layers:
                continue
            first = (layer + 1 - len(held)) * heads
            units = slice(first, (layer + 1) * heads)
            mass = torch.cat(masses)[units]
            parts.append(
                grow(torch.cat(held), mass, value[units], floor[units], starts, lengths, strength, thresholds, rule)
            )
            firsts.append(first)
            held = []
        return join(parts, firsts), torch.cat(masses)

    def _strength(self, observation: Observation, segments: Segments, row: Row) -> Tensor | None:
        """`[N]`: strength of the cut before each body token; None if none is stronger than another."""
        if self.cuts == "curvature":
            turns = curvature(row_states(observation, self.depths, row.index, self.name), self.scales, self.stability)
            before = torch.zeros(observation.shape[-1], device=turns.device)
            before[row.valid[1:]] = turns[:-1]
            return before[row.body]
        if self.cuts == "boundary" and segments.boundary is not None:
            return segments.boundary[row.index, row.body].float()
        return None


def frontier(trees: Trees, kept: Tensor, shape: torch.Size) -> Solution:
    """The partition that the nodes where `kept [K]` is True make of `shape` [U, N]."""
    unit, begin, end = trees.unit[kept], trees.begin[kept], trees.end[kept]
    begins = torch.zeros(shape, dtype=torch.bool, device=unit.device)
    begins[unit, begin] = True
    edges = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32, device=unit.device)
    one = torch.ones(len(unit), dtype=torch.int32, device=unit.device)
    edges.index_put_((unit, begin), one, accumulate=True)
    edges.index_put_((unit, end), -one, accumulate=True)
    return Solution(begins, edges.cumsum(1)[:, :-1] == 0)
