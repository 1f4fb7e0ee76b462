"""What is learned from a stream of observations, in memory that does not grow with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvframe.types import LayerObservation, ModelInfo, Observation

# Tokens kept as they are, evenly spaced over the stream: percentiles and distortions cannot be had from moments.
SAMPLE = 4096


@dataclass(eq=False)
class LayerMoments:
    """Sums over the tokens of one layer, fp64. `Gr` groups of `n` KV heads, `E = n * D`."""

    keys: Tensor  # [Gr, E, E], of x x^T
    key_sum: Tensor  # [Gr, E]
    values: Tensor  # [Gr, E, E]
    queries: Tensor  # [H, D, D], of q q^T over the query heads of each KV head
    sample_keys: list[Tensor] = field(default_factory=list)  # [s, H * D]
    sample_values: list[Tensor] = field(default_factory=list)


class Moments:
    """Running second moments of keys, values and queries, and a sample of the keys and values.

    Keys and queries are taken before RoPE (`before_rope`) or as they are cached; keys and values without their
    projection's bias. Of each observation only the body counts: protected tokens are never coded."""

    def __init__(self, model: ModelInfo, heads: int, before_rope: bool) -> None:
        self.model, self.heads, self.before_rope = model, heads, before_rope
        self.tokens = 0
        self.query_tokens = 0
        self._stride = 1
        size, groups, dim = heads * model.head_dim, model.kv_heads // heads, model.head_dim
        self.layers = [
            LayerMoments(
                torch.zeros(groups, size, size, dtype=torch.float64),
                torch.zeros(groups, size, dtype=torch.float64),
                torch.zeros(groups, size, size, dtype=torch.float64),
                torch.zeros(model.kv_heads, dim, dim, dtype=torch.float64),
            )
            for _ in range(model.layers)
        ]

    def add(self, observation: Observation) -> None:
        """Take the body of an observation into account."""
        body, valid = observation.body, observation.valid
        positions = observation.positions[body]
        count = len(positions)
        picked = torch.arange(-self.tokens % self._stride, count, self._stride)
        first = observation.layers[0].queries
        asked = 0 if first is None else int(valid[:, valid.shape[1] - first.shape[2] :].sum())
        for index, (layer, sums) in enumerate(zip(observation.layers, self.layers, strict=True)):
            keys, values = self.rows(layer, index, body, positions)
            for rows, moment in ((keys, sums.keys), (values, sums.values)):
                split = rows.unflatten(1, (len(moment), -1)).transpose(0, 1)  # [Gr, R, E]
                moment += (split.transpose(1, 2) @ split).double().cpu()
            sums.key_sum += keys.sum(0).view(sums.key_sum.shape).double().cpu()
            if len(picked):
                chosen = picked.to(keys.device)
                sums.sample_keys.append(keys[chosen].cpu())
                sums.sample_values.append(values[chosen].cpu())
            if layer.queries is not None:
                self._add_queries(layer.queries, observation, index)
        self.tokens += count
        self.query_tokens += asked
        self._thin()

    def overflowed(self) -> int | None:
        """The first layer whose sums hold infinities or NaN, None if there is none."""
        for index, sums in enumerate(self.layers):
            # A sum that is not finite shows in the diagonals: they are sums of squares.
            squares = [x.diagonal(dim1=-2, dim2=-1) for x in (sums.keys, sums.values, sums.queries)]
            if not all(bool(x.isfinite().all()) for x in squares):
                return index
        return None

    def rows(self, layer: LayerObservation, index: int, chosen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values fp32 `[R, H * D]` of the chosen tokens of one layer, without bias; `positions [R]`."""
        keys, values = (x.transpose(1, 2)[chosen].transpose(0, 1) for x in (layer.keys, layer.values))  # [H, R, D]
        keys = self.model.rope[index].unrotate(keys, positions) if self.before_rope else keys.float()
        key_bias, value_bias = self.model.projection_bias(index)
        flat_keys, flat_values = (x.transpose(0, 1).flatten(1) for x in (keys, values.float()))
        if key_bias is not None and self.before_rope:
            flat_keys = flat_keys - key_bias.float().to(flat_keys.device)
        return flat_keys, flat_values if value_bias is None else flat_values - value_bias.float().to(values.device)

    def _add_queries(self, queries: Tensor, observation: Observation, index: int) -> None:
        valid = observation.valid
        seen = valid[:, valid.shape[1] - queries.shape[2] :]
        rows = queries.transpose(1, 2)[seen].transpose(0, 1).float()  # [Hq, R, D]
        if self.before_rope:
            positions = observation.positions[:, valid.shape[1] - queries.shape[2] :][seen]
            rows = self.model.rope[index].unrotate(rows, positions)
        grouped = rows.unflatten(0, (self.model.kv_heads, -1)).flatten(1, 2)  # [H, G * R, D]
        self.layers[index].queries += (grouped.transpose(1, 2) @ grouped).double().cpu()

    def _thin(self) -> None:
        """Drop every second token of the sample when it has become twice too large."""
        held = sum(len(piece) for piece in self.layers[0].sample_keys)
        if held <= 2 * SAMPLE:
            return
        self._stride *= 2
        for sums in self.layers:
            sums.sample_keys = [torch.cat(sums.sample_keys)[::2].clone()]
            sums.sample_values = [torch.cat(sums.sample_values)[::2].clone()]
