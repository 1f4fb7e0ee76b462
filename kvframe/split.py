"""The split of a budget of bytes between entries and bits: a small search over an encoder's widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvframe import capping
from kvframe.budget import Regions
from kvframe.ops import dense_attention, merge_attention, merge_sinks
from kvframe.placement import on
from kvframe.stages import Encoder, Kernel
from kvframe.types import Observation, Part

# Last queries that judge a split.
QUERIES = 16


def attention_error(
    observation: Observation, regions: Regions, parts: Sequence[tuple[Part, ...]], kernel: Kernel
) -> float:
    """Mean over layers of |o - o'|^2 / |o|^2, summed over the last 16 queries of all heads and rows: `o` attends the
    exact tokens, `o'` the `parts` of each layer and the exact tail. 0 without queries."""
    tokens, errors, model = observation.shape[3], [], observation.model
    scale, softcap = model.scale, model.softcap
    for index, (layer, held) in enumerate(zip(observation.layers, parts, strict=True)):
        if layer.queries is None:
            continue
        tail, valid = on(regions.tail, layer.keys.device), on(observation.valid, layer.keys.device)
        query = layer.queries[:, :, -QUERIES:]
        asked = torch.arange(tokens - query.shape[2], tokens, device=valid.device)
        seen = tail[:, None] & (torch.arange(tokens, device=valid.device) <= asked[:, None])  # [B, Q, T]
        before = on(regions.sinks | regions.body, layer.keys.device)[:, None].expand_as(seen)
        sinks = on(model.sinks(index), query.device)
        whole = merge_sinks(attend_where(query, layer.keys, layer.values, seen | before, scale, softcap), sinks)[0]
        exact = attend_where(query, layer.keys, layer.values, seen, scale, softcap)
        found = [kernel.attend(query, part, scale, **capping.keywords(softcap)) for part in held]
        coded = merge_sinks(merge_attention([*found, exact]), sinks)[0]
        real = valid[:, None, asked, None]
        wrong = torch.where(real, whole - coded, 0).square().sum()
        errors.append(float(wrong / torch.where(real, whole, 0).square().sum().clamp_min(1e-30)))
    return sum(errors) / len(errors) if errors else 0.0


def attend_where(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention of `query [B, Hq, Q, D]` to the tokens where `seen` bool `[B, Q, T]`."""
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)
    return dense_attention(query, key, value, scale, bias[:, None], softcap)


def differences(encoders: Sequence[Encoder]) -> list[str]:
    """What sets each of the encoders apart, such as "key_bits 3, value_bits 3"."""
    dumps = [encoder.model_dump() for encoder in encoders]
    names = [name for name in dumps[0] if any(dump[name] != dumps[0][name] for dump in dumps)]
    return [", ".join(f"{name} {dump[name]}" for name in names) for dump in dumps]
