"""The interval tables of one row's body, chunk by chunk of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.ops import IntervalTables, interval_distortion
from kvframe.types import Observation
from kvframe_gracekv.rows import Row, queries_at


@dataclass(frozen=True)
class Loss:
    """The numbers in the distortion of an interval; see `kvframe.ops.interval_distortion`."""

    mass_share: float = 0.25
    base: float = 0.1
    coherent: bool = True


def layer_tables(
    observation: Observation, row: Row, scores: Tensor, longest: int, probes: int, loss: Loss, owner: str
) -> Iterator[tuple[int, IntervalTables]]:
    """Yield `(layer, tables)` over the body's tokens, the units being the layer's KV heads. `scores [L, H, N]`.

    Each probe stands for one query head of a KV head's group, taken in turn."""
    model = observation.model
    for layer, seen in enumerate(observation.layers):
        queries, columns = queries_at(observation, layer, row, row.probes[-probes:], owner)  # [Hq, P, D]
        probe = torch.arange(len(columns), device=columns.device)
        head = probe % model.group
        queries = queries.unflatten(0, (model.kv_heads, model.group))[:, head, probe]  # [H, P, D]
        keys, values = (x[row.index][:, row.body] for x in (seen.keys, seen.values))
        yield layer, interval_distortion(
            keys, values, queries, scores[layer], model.rope, model.scale, longest,
            mass_share=loss.mass_share, base=loss.base, coherent=loss.coherent,
        )  # fmt: skip
