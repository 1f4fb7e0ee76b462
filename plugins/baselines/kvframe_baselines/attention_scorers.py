"""Scores from the attention that keys get in the prefill: of all queries (H2O), of the last ones (SnapKV), of one
(TOVA)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Needs, Observation, Segments
from kvframe_baselines.columns import attention_sums, last_tokens, observed_queries


def window_attention(observation: Observation, index: int, window: int, owner: str) -> Tensor:
    """Return fp32 `[B, Hq, T]`: the mean attention, in layer `index`, of the last `window` valid tokens of each row, or
    of all it has."""
    model, layer = observation.model, observation.layers[index]
    queries = observed_queries(layer, owner)
    columns = last_tokens(observation.valid, window, queries.shape[2])
    terms = model.scale, model.softcap, model.sinks(index)
    sums = attention_sums(layer, queries, columns, observation.valid, *terms)
    return sums / (columns >= 0).sum(1).clamp_min(1)[:, None, None]


def group_mean(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """Return `[..., H, T]`: the mean of `[..., Hq, T]` over the query heads that share a KV head."""
    return per_query_head.unflatten(-2, (kv_heads, -1)).mean(-2)


def pool_tokens(scores: Tensor, valid: Tensor, pool: Literal["average", "max"], width: int) -> Tensor:
    """Pool `scores [L, B, Hq, T]` (>= 0) over `width` tokens around each one; beyond the ends of a row stand zeros.

    Neighbours are neighbours in the text: padding of `valid` bool `[B, T]` between two tokens is skipped."""
    if width == 1:
        return scores
    order = (~valid).int().argsort(dim=1, stable=True)[None, :, None].expand(scores.shape)  # valid tokens first
    inside = valid.gather(1, order[0, :, 0])[None, :, None]
    packed = torch.where(inside, scores.gather(-1, order), 0).flatten(0, 2)  # [L*B*Hq, T]
    operation = F.avg_pool1d if pool == "average" else F.max_pool1d
    pooled = operation(packed[None], width, 1, width // 2)[0].view(scores.shape)
    return torch.empty_like(scores).scatter_(-1, order, pooled)


class H2O(Scorer):
    """Accumulated attention (heavy hitters): what all queries of the prompt give a key.

        score[t] = sum over valid queries q >= t of attention(q, t) [/ number of those queries], mean over the group

    Direction: much attended = keep. Source: Zhang et al. 2023, without its greedy eviction at every step:
    the full attention matrix of the prefill is summed once."""

    paper: ClassVar[str] = "Zhang et al., 2023, arXiv 2306.14048"

    name: Literal["baselines.h2o"] = "baselines.h2o"
    normalise: Literal["mean", "sum"] = Field(
        "mean",
        description="mean = attention per query that can see the key (0 to 1); sum = the paper's accumulated attention "
        "(in queries), which favours early tokens because more queries see them.",
    )

    @property
    def needs(self) -> Needs:
        """The queries of all tokens."""
        return Needs(queries="all")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the attention that each key gets, fp32 `[L, B, H, T]`."""
        _, _, heads, tokens = observation.shape
        valid = observation.valid
        scores = []
        model = observation.model
        for index, layer in enumerate(observation.layers):
            queries = observed_queries(layer, self.name)
            observed = queries.shape[2]
            columns = torch.arange(tokens - observed, tokens, device=valid.device)
            columns = torch.where(valid[:, tokens - observed :], columns, -1)  # [B, Tq]
            terms = model.scale, model.softcap, model.sinks(index)
            sums = attention_sums(layer, queries, columns, valid, *terms)
            if self.normalise == "mean":
                counted = F.pad((columns >= 0).long(), (tokens - observed, 0))
                seen_by = counted.flip(1).cumsum(1).flip(1)  # [B, T] queries at or after each key
                sums = sums / seen_by.clamp_min(1)[:, None]
            scores.append(group_mean(sums, heads))
        return torch.stack(scores)


class SnapKV(Scorer):
    """Attention of an observation window at the end of the prompt, pooled over neighbouring tokens.

        attention[s] = mean over window queries q of attention(q, s)
        score[t] = mean over the group of pool of attention[s] over |s - t| <= pool_width // 2

    Direction: much attended = keep. Source: Li et al. 2024 (voting and clustering of the window). When the question is
    the end of the prompt, the window sees it. Protected tokens are kept anyhow and do not lend their attention to
    their neighbours.

    A pool of 5 or 7 keeps the surroundings of a needle's key but not the digits of its value (7 one-digit tokens):
    on SmolLM2-135M at ratio 4 such needles are lost, and found with `pool: max, pool_width: 21`, which in turn costs
    quality on running text."""

    paper: ClassVar[str] = "Li et al., 2024, arXiv 2404.14469"

    name: Literal["baselines.snapkv"] = "baselines.snapkv"
    window: int = Field(64, ge=1, description="Tokens at the end of the prompt whose queries are observed.")
    pool: Literal["average", "max"] = Field(
        "average", description="How the attention of neighbouring tokens is pooled."
    )
    pool_width: int = Field(5, ge=1, description="Tokens pooled around each token, an odd number; 1 = no pooling.")

    @field_validator("pool_width")
    @classmethod
    def _odd(cls, width: int) -> int:
        if width % 2 == 0:
            raise ValueError(f"pool_width must be odd so that the pool is centred; use {width - 1} or {width + 1}")
        return width

    @property
    def needs(self) -> Needs:
        """The queries of the window."""
        return Needs(queries=self.window)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the pooled attention of the window, fp32 `[L, B, H, T]`, between 0 and 1."""
        layers = [window_attention(observation, i, self.window, self.name) for i in range(observation.model.layers)]
        attention = torch.where(observation.body[:, None], torch.stack(layers), 0)  # [L, B, Hq, T]
        pooled = pool_tokens(attention, observation.valid, self.pool, self.pool_width)
        return group_mean(pooled, observation.model.kv_heads)


class TOVA(Scorer):
    """Attention of the last token.

        score[t] = mean over all query heads of attention(last valid query, t), the same for every KV head

    Direction: much attended = keep. Source: Oren et al. 2024, applied once after the prefill, not after
    every step."""

    paper: ClassVar[str] = "Oren et al., 2024, arXiv 2401.06104"

    name: Literal["baselines.tova"] = "baselines.tova"

    @property
    def needs(self) -> Needs:
        """The last query."""
        return Needs(queries=1)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the attention of the last token, fp32 `[L, B, H, T]`, between 0 and 1."""
        layers = [window_attention(observation, i, 1, self.name) for i in range(observation.model.layers)]
        return torch.stack(layers).mean(2, keepdim=True).expand(observation.shape)
