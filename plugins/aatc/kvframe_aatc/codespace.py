"""Attention to keys that were coded as cached, in code space: no key and no value is rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvframe.ops import Packed, PackedRows, packed_attention
from kvframe.types import Encoded
from kvframe_aatc.coder import Coder
from kvframe_aatc.layout import group_runs
from kvframe_aatc.quantiser import Channels

Segments = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, eq=False)
class Space:
    """The maps between heads and codes for all groups of a layer, fp32, zero beyond a group's own channels.

    Attributes:
        keys: `[Gr, n, D, C + 1]`, from a query to its products with each key channel; last, with a code's first level.
        values: `[Gr, n, C' + 1, D]`, from a sum of codes to that of values; last, from the sum of scales.
        key_center, value_center: `[Gr, n, D, 1]` and `[Gr, n, 1, D]`.
        segments, tables, levels: of keys and of values, as `kvframe.ops.Packed` has them.
    """

    keys: Tensor
    values: Tensor
    key_center: Tensor
    value_center: Tensor
    segments: tuple[Segments, Segments]
    tables: tuple[Tensor | None, Tensor | None]
    levels: tuple[bool, bool]


def space(coders: list[tuple[Coder, Coder]], heads: int) -> Space:
    """The maps of the groups' coders `(keys, values)`, each for `heads` KV heads."""
    sides = [_side([pair[index] for pair in coders], heads) for index in (0, 1)]
    (keys, key_center), (values, value_center) = sides
    channels = [[pair[index].channels for pair in coders] for index in (0, 1)]
    return Space(
        keys.transpose(-1, -2).contiguous(),
        values,
        key_center[..., None],
        value_center[..., None, :],
        (_segments(channels[0]), _segments(channels[1])),
        (_scale_table(channels[0], keys.device), _scale_table(channels[1], keys.device)),
        (channels[0][0].code == "lloyd", channels[1][0].code == "lloyd"),
    )


def _side(coders: list[Coder], heads: int) -> tuple[Tensor, Tensor]:
    """Matrices `[Gr, n, C + 1, D]` and centers `[Gr, n, D]`."""
    most = max(len(coder.synthesis) for coder in coders)
    dim = coders[0].synthesis.shape[1] // heads
    like = coders[0].synthesis
    matrices = like.new_zeros(len(coders), most + 1, heads * dim)
    centers = like.new_zeros(len(coders), heads * dim)
    for matrix, center, coder in zip(matrices, centers, coders, strict=True):
        count = len(coder.synthesis)
        if coder.channels.code == "max":
            _, _, _, step, first = coder.channels.moved(like.device)
            matrix[:count] = step * coder.synthesis
            matrix[-1] = (first * coder.synthesis).sum(0)
        else:
            matrix[:count] = coder.synthesis
        if coder.center is not None:
            center.copy_(coder.center)
    return matrices.unflatten(-1, (heads, dim)).transpose(1, 2).contiguous(), centers.unflatten(-1, (heads, dim))


def attend(query: Tensor, encoded: Encoded, maps: Space, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    """Attend codes of keys after RoPE; contract as `Kernel.attend`."""
    batch, query_heads, length, dim = query.shape
    groups, heads = maps.keys.shape[:2]
    shape = (batch, groups, heads, query_heads // (groups * heads) * length)
    asked = (query.float() * scale).reshape(*shape, dim)
    projected = (asked @ maps.keys).view(batch * groups, heads * shape[-1], -1)
    rows = PackedRows(
        _lengths(encoded.bounds, groups * heads, heads), groups, heads, encoded.offsets, encoded.log_multiplicity
    )
    keys, values = (
        Packed(
            encoded.codes[f"{side}s"],
            encoded.codes[f"{side}_scales"],
            *(maps.tables[index], maps.segments[index], maps.levels[index]),
        )
        for index, side in enumerate(("key", "value"))
    )
    codes, lse = packed_attention(projected[..., :-1], projected[..., -1], keys, values, rows, impl)
    lse = lse.view(shape)
    out = codes.view(*shape, -1) @ maps.values
    out += maps.value_center * lse.isfinite()[..., None]
    lse = lse + (asked @ maps.key_center)[..., 0]
    return out.reshape(query.shape), lse.reshape(query.shape[:-1])


@lru_cache(maxsize=256)
def _lengths(bounds: tuple[int, ...], kv_heads: int, heads: int) -> tuple[int, ...]:
    """Rows of each pair of a batch row and a group."""
    runs = group_runs(bounds, kv_heads, heads)
    return tuple(n for row in zip(*(run.lengths for run in runs), strict=True) for n in row)


def _segments(channels: list[Channels]) -> Segments:
    """Widths and how many channels have them, for each group."""
    return tuple(tuple((width, place.stop - place.start) for width, place, _ in one.segments) for one in channels)


def _scale_table(channels: list[Channels], device: torch.device) -> Tensor | None:
    """What 8-bit scales stand for, fp32 `[Gr, 256]`."""
    if channels[0].scale_bits == 16:
        return None
    stored = torch.arange(256, dtype=torch.uint8, device=device)
    return torch.stack([one.loaded(stored) for one in channels])
