"""How much each token is worth: what the question attends, and what that in turn rests on."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Needs, Observation, Segments
from kvframe_gracekv.rows import Row, attention_at, pick, rows

_EPS = 1e-12


class ValueFlow(Scorer):
    """GraceKV's token value.

        direct[t] = sum over probes u and the group's heads of attention(u, t), normalised over the body
        flow[t] = sum over hops k of decay^(k-1) * sum over seeds u of w_u * attention(u, t) on the graph's layers
        score[t] = (1 - graph_share) * direct[t] + graph_share * flow[t] / (sum over the body of flow)

    The seeds of the first hop are the body's tokens of highest direct value (mean over layers and heads) up to
    `seed_mass` of it, at most `seeds`; those of the next hop are chosen in the same way by what the last one gave,
    without the seeds so far. Scores of a (layer, head) sum to 1 over the body. Direction: higher = keep. With `hops: 0`
    or `graph_share: 0` only the probes' queries are observed, else all. Source: Tian et al. 2026, value flow."""

    paper: ClassVar[str] = "Tian et al., 2026, arXiv 2608.07001"

    name: Literal["gracekv.value_flow"] = "gracekv.value_flow"
    question_probes: int = Field(
        32, ge=0, description="Tokens at the end of the question whose attention counts; without one, of the prompt."
    )
    sequence_probes: int = Field(16, ge=1, description="Tokens at the end of the prompt whose attention counts.")
    hops: int = Field(2, ge=0, le=8, description="Steps of propagation; 0 = direct relevance alone.")
    graph_share: float = Field(0.3, ge=0, le=1, description="Share (0 to 1) of the propagated value.")
    decay: float = Field(0.5, gt=0, le=1, description="Weight of a hop relative to the one before it.")
    graph_depths: tuple[float, ...] = Field(
        (0.5, 0.75), min_length=1, description="Relative depths (0 to 1) of the layers on which value propagates."
    )
    seed_mass: float = Field(0.9, gt=0, le=1, description="Share of the value that the seeds of a hop must hold.")
    seeds: int = Field(64, ge=1, description="Seeds of a hop at most.")
    seed_weights: Literal["mass", "equal"] = Field(
        "mass", description="mass = a seed counts by its value, equal = all alike; the paper is silent on later hops."
    )
    pool_width: int = Field(
        1, ge=1, description="Tokens around each one (odd) over which direct relevance is averaged; 1 = as the paper."
    )
    pool_share: float = Field(
        1.0, ge=0, le=1, description="Share (0 to 1) of the averaged relevance; the rest is the token's own."
    )

    @field_validator("pool_width")
    @classmethod
    def _odd(cls, width: int) -> int:
        if width % 2 == 0:
            raise ValueError(f"pool_width must be odd so that the pool is centred; use {width - 1} or {width + 1}")
        return width

    @property
    def _propagates(self) -> bool:
        return self.hops > 0 and self.graph_share > 0

    @property
    def needs(self) -> Needs:
        """The queries of the probes, or of all tokens if value propagates."""
        return Needs(queries="all" if self._propagates else self.question_probes + self.sequence_probes)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the token values, fp32 `[L, B, H, T]`; each (layer, row, head) sums to 1 over the body."""
        scores = torch.zeros(observation.shape, device=observation.valid.device)
        for row in rows(observation, self.question_probes, self.sequence_probes):
            if len(row.body) and len(row.probes):
                scores[:, row.index][..., row.body] = self._row(observation, row)
        return scores

    def _row(self, observation: Observation, row: Row) -> Tensor:
        """`[L, H, N]` over the body of one row."""
        model = observation.model
        inside = torch.isin(row.valid, row.body).nonzero()[:, 0]
        direct = []
        for layer in range(model.layers):
            attention = attention_at(observation, layer, row, row.probes, self.name)  # [Hq, P, n]
            direct.append(pick(attention, inside, 2).sum(1).unflatten(0, (model.kv_heads, -1)).sum(1))
        relevance = torch.stack(direct)  # [L, H, N]
        if self.pool_width > 1:
            pooled = torch.nn.functional.avg_pool1d(relevance, self.pool_width, 1, self.pool_width // 2)
            relevance = (1 - self.pool_share) * relevance + self.pool_share * pooled
        relevance = normalised(relevance)
        if not self._propagates:
            return relevance
        flow = self._flow(observation, row, relevance.mean((0, 1)), inside)
        return (1 - self.graph_share) * relevance + self.graph_share * flow

    def _flow(self, observation: Observation, row: Row, consensus: Tensor, inside: Tensor) -> Tensor:
        """`[N]`: value that reaches the body's tokens through the seeds, summing to 1."""
        model = observation.model
        layers = sorted({min(int(depth * model.layers), model.layers - 1) for depth in self.graph_depths})
        total, mass = torch.zeros_like(consensus), consensus
        spent = torch.zeros_like(consensus, dtype=torch.bool)
        queries = observation.layers[0].queries
        # Only tokens whose queries were observed can pass value on.
        asks = spent if queries is None else row.body >= observation.shape[-1] - queries.shape[2]
        for hop in range(self.hops):
            chosen = self._seeds(mass.masked_fill(~asks, 0))  # [S], indices into the body
            if not len(chosen):
                break
            weight = normalised(mass[chosen] if self.seed_weights == "mass" else torch.ones_like(mass[chosen]))
            spent[chosen] = True
            reached = torch.zeros_like(total)
            for layer in layers:
                attention = attention_at(observation, layer, row, row.body[chosen], self.name)  # [Hq, S, n]
                reached += weight @ pick(attention, inside, 2).sum(0)  # [S] @ [S, N]
            mass = reached.masked_fill(spent, 0)
            total += self.decay**hop * mass
        return normalised(total)

    def _seeds(self, mass: Tensor) -> Tensor:
        """The tokens of highest mass, until they hold `seed_mass` of it or are `seeds`."""
        share, order = normalised(mass).sort(descending=True, stable=True)
        before = share.cumsum(0) - share
        # Where there is no mass, `share` is even, but nothing is a seed.
        count = int(((before < self.seed_mass) & (mass[order] > 0)).sum())
        return order[: min(count, self.seeds)]


def normalised(mass: Tensor) -> Tensor:
    """`mass [..., N]` divided by its sum; equal shares where there is none."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > _EPS, mass / total.clamp_min(_EPS), 1.0 / max(1, mass.shape[-1]))
