"""The interval tables of one row's body, chunk by chunk of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.ops import IntervalTables, interval_distortion
from kvframe.rope import LayerRopes, Rope
from kvframe.types import Observation
from kvframe_gracekv.rows import Row, pick, queries_at

# Numbers of one working array, probes times tokens: enough to outweigh the cost of a call, no more than memory allows.
_GROUP = 1 << 15


def joined(parts: list[Tensor]) -> Tensor:
    """The parts behind each other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def alike(rope: Rope | LayerRopes, layers: int, most: int) -> Iterator[range]:
    """The layers in order, at most `most` at once, and only such as rotate alike."""
    first = 0
    while first < layers:
        last = first + 1
        while last < min(first + most, layers) and rope[last].equals(rope[first]):
            last += 1
        yield range(first, last)
        first = last


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
    model, tokens = observation.model, max(1, len(row.body))
    at_once = max(1, _GROUP // (model.kv_heads * probes * tokens))
    for layers in alike(model.rope, model.layers, at_once):
        queries = []
        for layer in layers:
            found, columns = queries_at(observation, layer, row, row.probes[-probes:], owner)  # [Hq, P, D]
            probe = torch.arange(len(columns), device=columns.device)
            queries.append(
                found.unflatten(0, (model.kv_heads, model.group))[:, probe % model.group, probe]
            )  # [H, P, D]
        seen = [observation.layers[layer] for layer in layers]
        keys, values = (
            joined([pick(getattr(x, name)[row.index], row.body, 1) for x in seen]) for name in ("keys", "values")
        )
        table = interval_distortion(
            keys,
            values,
            joined(queries),
            scores[layers.start : layers.stop].flatten(0, 1),
            model.rope[layers.start],
            model.scale,
            longest,
            mass_share=loss.mass_share,
            base=loss.base,
            coherent=loss.coherent,
        )
        for index, layer in enumerate(layers):
            units = slice(index * model.kv_heads, (index + 1) * model.kv_heads)
            yield layer, IntervalTables(table.distortion[units], table.multiplicity[units], table.mass[units])
