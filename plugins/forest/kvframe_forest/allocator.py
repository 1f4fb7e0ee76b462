"""The allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.errors import InputError
from kvframe.rope import Rope
from kvframe.stages import Allocator
from kvframe.types import Grades, LayerPlan, Needs, Observation, Plan, Segments
from kvframe_forest.grading import Offer, prune_graded
from kvframe_forest.growth import grow, places
from kvframe_forest.pruning import owners, prune


class Pruned(Allocator):
    """Merges tokens where it costs least, wherever that is, keeps those that cost too much, and drops those that are
    worth least.

    A token of a head is a point: its key before RoPE, each pair of channels scaled by the size that the observed
    queries have there, beside its value, relative to the size of values (`value_share`). Its weight is the scorer's
    share of the head, mixed with a uniform one (`base`). An entry for several tokens costs

        sum of w_t |x_t - mean x|^2        (mean weighted by w)

    which is the expected squared error of its logits, seen from any distance, and of its output. The passes of chunked
    soft matching make a binary forest of possible entries. For a price of an entry its cheapest pruning is exact; one
    price over all layers, heads and chunks meets the budget. A dropped token costs w_t `drop`. Source: own; the
    matching of CentroidKV (arXiv 2506.11418), the exact budget of GraceKV's problem (arXiv 2608.07001)."""

    paper: ClassVar[str] = "own, after CentroidKV, arXiv 2506.11418, and GraceKV, arXiv 2608.07001"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    chooses_grades: ClassVar[bool] = True

    name: Literal["forest.pruned"] = "forest.pruned"
    chunk: int = Field(64, ge=2, description="Nodes of a head among which partners are sought.")
    passes: int = Field(16, ge=0, le=64, description="Passes of matching; 0 = tokens are kept or dropped, not merged.")
    max_share: float = Field(0.5, gt=0, le=1, description="Share (0 to 1) of a row's sources that a pass may merge.")
    queries: int = Field(64, ge=1, description="Last queries, whose sizes say which channels of keys matter.")
    base: float = Field(0.3, gt=0, le=1, description="Uniform share of a token's weight; the rest is the scorer's.")
    value_share: float = Field(0.5, ge=0, description="Weight of a value's relative squared error.")
    drop: float = Field(10.0, gt=0, description="Loss of a dropped token, relative to its weight.")
    steps: int = Field(40, ge=1, description="Prices tried at most.")

    @property
    def needs(self) -> Needs:
        """The last queries."""
        return Needs(queries=self.queries)

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of exactly the budget, or of the whole body if that is smaller. Raises InputError, naming the
        layer, if a key or a value is not finite."""
        return self._allocate(observation, scores, budget, None)

    def allocate_graded(
        self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor, grades: Grades
    ) -> Plan:
        """Return a plan whose graded entries cost no more than the budget. Coding an entry loses its weight times the
        grade's error of how far the head's points are from their mean. Raises InputError as `allocate` does."""
        return self._allocate(observation, scores, budget, grades)

    def _allocate(self, observation: Observation, scores: Tensor, budget: Tensor, grades: Grades | None) -> Plan:
        layers, batch, heads, tokens = observation.shape
        body = observation.body
        free = body[None, :, None].expand(layers, batch, heads, tokens)
        place = free.flatten().nonzero().squeeze(1)  # [M], by unit, then column
        unit = place // tokens
        row = unit // heads % batch
        points = torch.cat([self._points(observation, index)[free[index]] for index in range(layers)])  # [M, 2D]
        weight = self._weights(scores, body).flatten()[place].to(points.dtype)
        forest = grow(points, weight, unit, row, self.chunk, self.passes, self.max_share)
        drop = weight.double() * self.drop
        if grades is not None:
            offer = Offer.of(forest, points, weight, unit, (layers, batch, heads), grades)
            graded, grade = prune_graded(forest, drop, offer, budget, self.steps)
            return self._plan(observation, owners(forest, graded), place, unit, weight, grade)
        row_of = torch.cat([row, *(row[:0].new_zeros(len(left)) for left, _ in forest.levels)])
        begin = forest.leaves
        for left, _ in forest.levels:
            row_of[begin : begin + len(left)] = row_of[left]
            begin += len(left)
        choice = prune(forest, drop, row_of, torch.minimum(budget, layers * heads * body.sum(1)), self.steps)
        return self._plan(observation, owners(forest, choice), place, unit, weight)

    def _points(self, observation: Observation, index: int) -> Tensor:
        """The points `[B, H, T, 2D]` of a layer, fp32 (fp64 if its keys are)."""
        model, layer = observation.model, observation.layers[index]
        keys = model.rope[index].unrotate(layer.keys, observation.positions[:, None])
        values = layer.values.to(keys.dtype)
        mask = observation.body[:, None, :, None]
        for name, tensor in (("keys", keys), ("values", values)):
            if not bool(torch.where(mask, tensor, 0).isfinite().all()):
                raise InputError(
                    f"The {name} of layer {model.layer_ids[index]} are not finite, so they cannot be clustered; the "
                    "model overflows: load it in bfloat16 or float32."
                )
        if layer.queries is None:
            raise InputError(f"{self.name} needs the last queries; capture what it `needs`.")
        size = self._query_sizes(observation, layer.queries.to(keys.dtype), model.rope[index])  # [B, H, D]
        keys = keys * (size.sqrt() * model.scale)[:, :, None]
        norm = torch.where(mask, values, 0).square().sum((2, 3)) / observation.body.sum(1).clamp_min(1)[:, None]
        values = values * (self.value_share / norm.clamp_min(1e-30)).sqrt()[:, :, None, None]
        return torch.cat([keys, values], -1)

    def _query_sizes(self, observation: Observation, queries: Tensor, rope: Rope) -> Tensor:
        """Mean square `[B, H, D]` of the last queries, the same for both channels of a pair: from afar a rotation mixes
        them. Queries `[B, Hq, Tq, D]`; those of padding do not count."""
        model, valid = observation.model, observation.valid[:, -queries.shape[2] :]
        from_end = valid.flip(1).cumsum(1).flip(1)
        seen = (valid & (from_end <= self.queries))[:, None, :, None]
        square = torch.where(seen, queries, 0).square().sum(2) / seen.sum(2).clamp_min(1)  # [B, Hq, D]
        square = square.unflatten(1, (model.kv_heads, model.group)).mean(2)
        half = len(rope.inv_freq)
        both = (square[..., :half] + square[..., half : 2 * half]) / 2
        return torch.cat([both, both, square[..., 2 * half :]], -1)

    def _weights(self, scores: Tensor, body: Tensor) -> Tensor:
        """Weights fp32 `[L, B, H, T]`, summing to 1 over the body of each head."""
        count = body.sum(1).clamp_min(1)[None, :, None, None]
        total = scores.sum(-1, keepdim=True)
        share = torch.where(total > 0, scores / total.clamp_min(1e-30), 1 / count)
        return (1 - self.base) * share + self.base / count

    def _plan(
        self,
        observation: Observation,
        owner: Tensor,
        place: Tensor,
        unit: Tensor,
        weight: Tensor,
        grade: Tensor | None = None,
    ) -> Plan:
        """One plan a layer; entries are numbered by the mean position of their tokens. `grade` `[nodes]`, if any."""
        layers, batch, heads, tokens = observation.shape
        kept = (owner >= 0).nonzero().squeeze(1)
        node, entry, size = owner[kept].unique(return_inverse=True, return_counts=True)
        count, where = len(node), place[kept]
        position = observation.positions[where // (tokens * heads) % batch, where % tokens].double()
        mean = position.new_zeros(count).index_add_(0, entry, position) / size
        of = unit.new_zeros(count).scatter_(0, entry, unit[kept])
        order = mean.argsort(stable=True)
        order = order[of[order].argsort(stable=True)]
        number = torch.empty_like(order).scatter_(0, order, places(of[order]))
        assignment = place.new_full((layers, batch, heads, tokens), -1, dtype=torch.int32)
        assignment.view(-1)[where] = number[entry].int()
        total = weight.new_zeros(count).index_add_(0, entry, weight[kept])
        share = torch.zeros(assignment.shape, device=place.device)
        share.view(-1)[where] = (weight[kept] / total[entry]).float()
        n_entries = torch.bincount(of, minlength=layers * batch * heads).view(layers, batch, heads)
        plans = [LayerPlan(assignment[i], n_entries[i], share[i], share[i]) for i in range(layers)]
        if grade is not None:
            ordered = grade[node][order].split([int(n) for n in n_entries.sum((1, 2))])
            plans = [replace(plan, grade=part) for plan, part in zip(plans, ordered, strict=True)]
        return Plan(tuple(plans))
