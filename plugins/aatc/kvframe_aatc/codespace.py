"""Attention in code space: no value is rebuilt, and no key that was coded as cached. Keys coded before RoPE are rebuilt
block by block, on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvframe.ops import Packed, PackedRows, Rebuild, bitpack, packed_attention
from kvframe.rope import Rope
from kvframe.types import Encoded
from kvframe_aatc.coder import Coder
from kvframe_aatc.layout import group_runs, unpack_positions
from kvframe_aatc.quantiser import Channels

POSITIONS = 4096  # the rotation's factors are made for so many positions more at a time
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

    @cached_property
    def flat_keys(self) -> Tensor:
        """`[Gr, C + 1, n * D]`, from codes to keys; last, the first levels' share."""
        return self.keys.permute(0, 3, 1, 2).flatten(2).contiguous()


def space(coders: list[tuple[Coder, Coder]], heads: int) -> Space:
    """The maps of the groups' coders `(keys, values)`, each for `heads` KV heads."""
    (keys, key_center), (values, value_center) = (_side([pair[index] for pair in coders]) for index in (0, 1))
    channels = [[pair[index].channels for pair in coders] for index in (0, 1)]
    dim = keys.shape[-1] // heads
    return Space(
        keys.unflatten(-1, (heads, dim)).permute(0, 2, 3, 1).contiguous(),
        values.unflatten(-1, (heads, dim)).transpose(1, 2).contiguous(),
        key_center.unflatten(-1, (heads, dim, 1)),
        value_center.unflatten(-1, (heads, 1, dim)),
        (_segments(channels[0]), _segments(channels[1])),
        (_scale_table(channels[0], keys.device), _scale_table(channels[1], keys.device)),
        (channels[0][0].code == "lloyd", channels[1][0].code == "lloyd"),
    )


def _side(coders: list[Coder]) -> tuple[Tensor, Tensor]:
    """Matrices `[Gr, C + 1, n * D]` and centers `[Gr, n * D]`."""
    like = coders[0].synthesis
    matrices = like.new_zeros(len(coders), max(len(coder.synthesis) for coder in coders) + 1, like.shape[1])
    centers = like.new_zeros(len(coders), like.shape[1])
    for matrix, center, coder in zip(matrices, centers, coders, strict=True):
        count = len(coder.synthesis)
        matrix[:count] = coder.synthesis
        if coder.channels.code == "max":
            _, _, _, step, first = coder.channels.moved(like.device)
            matrix[:count] *= step
            matrix[-1] = (first * coder.synthesis).sum(0)
        if coder.center is not None:
            center.copy_(coder.center)
    return matrices, centers


def attend(
    query: Tensor,
    encoded: Encoded,
    maps: Space,
    rope: Rope | None,
    scale: float,
    impl: str,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend codes of keys after RoPE (`rope` None) or before it; contract as `Kernel.attend`."""
    batch, query_heads, length, dim = query.shape
    groups, heads = maps.keys.shape[:2]
    shape = (batch, groups, heads, query_heads // (groups * heads) * length)
    pairs = (batch * groups, heads * shape[-1])
    asked = (query.float() * scale).reshape(*shape, dim)
    lengths = _lengths(encoded.bounds, groups * heads, heads)
    rows = PackedRows(lengths, groups, heads, encoded.offsets, encoded.log_multiplicity)
    keys, values = (
        Packed(
            encoded.codes[f"{side}s"],
            encoded.codes[f"{side}_scales"],
            *(maps.tables[index], maps.segments[index], maps.levels[index]),
        )
        for index, side in enumerate(("key", "value"))
    )
    if rope is None:
        projected = (asked @ maps.keys).view(*pairs, -1)
        shift = (asked @ maps.key_center).view(pairs)
        codes, lse = packed_attention(
            projected[..., :-1], projected[..., -1], keys, values, rows, impl, softcap=softcap, shift=shift
        )
    else:
        rebuild = _rebuild(encoded, maps, lengths, rope)
        whole = asked.view(*pairs, dim)
        codes, lse = packed_attention(whole, None, keys, values, rows, impl, rebuild, softcap)
    lse = lse.view(shape)
    out = codes.view(*shape, -1) @ maps.values
    out += maps.value_center * lse.isfinite()[..., None]
    return out.reshape(query.shape), lse.reshape(query.shape[:-1])


def _rebuild(encoded: Encoded, maps: Space, lengths: tuple[int, ...], rope: Rope) -> Rebuild:
    """How the keys are made, and the positions of all rows, group after group."""
    groups = maps.keys.shape[0]
    runs = bitpack.Runs(tuple(n for group in range(groups) for n in lengths[group::groups]))
    positions = unpack_positions(encoded.codes["starts"], _distances(encoded), runs).int()
    matrix = maps.flat_keys
    last = int(positions.max()) if len(positions) else 0
    cos, sin = _factors(rope, -(-(last + 1) // POSITIONS) * POSITIONS)
    return Rebuild(matrix[:, :-1], matrix[:, -1], maps.key_center.flatten(1), positions, cos, sin)


@lru_cache(maxsize=8)
def _factors(rope: Rope, count: int) -> tuple[Tensor, Tensor]:
    """The rotation's factors, shared by all layers of a model."""
    return rope.factors(count)


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


def _distances(encoded: Encoded) -> Tensor:
    starts = encoded.codes["starts"]
    return encoded.codes.get("distances", starts.new_zeros(len(starts), 0))
