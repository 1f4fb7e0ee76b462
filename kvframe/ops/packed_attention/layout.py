"""What is attended in code space, and where each pair's codes lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvframe.ops import lloyd_max
from kvframe.ops.bitpack import LANES

MAX_SEGMENTS = 16


@dataclass(frozen=True, eq=False)
class Packed:
    """The codes of one side, keys or values.

    Attributes:
        words: int32, group after group, each `[blocks, W]` as `ops.bitpack` packs it, segment after segment.
        scales: one a row, group after group: bfloat16, or uint8 that index `scale_table`.
        scale_table: fp32 `[groups, 256]`, or None.
        segments: for each group its `(width, channels)` in the order of the words, widest first.
        levels: codes stand for the Lloyd-Max levels of N(0, 1) of their width; False = for themselves.
    """

    words: Tensor
    scales: Tensor
    scale_table: Tensor | None
    segments: tuple[tuple[tuple[int, int], ...], ...]
    levels: bool

    @property
    def channels(self) -> int:
        """The most channels of any group."""
        return max(sum(count for _, count in segments) for segments in self.segments)

    @property
    def words_a_block(self) -> tuple[int, ...]:
        """`W` of each group."""
        return tuple(sum(width * count for width, count in segments) for segments in self.segments)

    @property
    def table(self) -> Tensor:
        """The segments as int64 `[groups, 16, 2]`, zeros beyond."""
        return _segment_table(self.segments, self.words.device)

    def loaded(self, group: int, first: int, n: int) -> Tensor:
        """The scales of `n` rows of a group, fp32."""
        stored = self.scales[first : first + n]
        return stored.float() if self.scale_table is None else self.scale_table[group, stored.long()]


@dataclass(frozen=True, eq=False)
class Rebuild:
    """How keys that were coded before RoPE are made of what their codes stand for: they must be rotated one by one, so
    that no query can meet them in code space.

    Attributes:
        synthesis: fp32 `[groups, C, n * D]`, zero beyond a group's own channels; a key of the group's `n` heads is
            `scale * (levels @ synthesis + first) + center`.
        first, center: fp32 `[groups, n * D]`.
        positions: int32, one a row in the order of the scales.
        cos, sin: fp32 `[positions, R / 2]`, the rotation's factors; channel `i` is paired with `i + R / 2`, those
            beyond `R` are not rotated.
    """

    synthesis: Tensor
    first: Tensor
    center: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class PackedRows:
    """`lengths`: the rows of each pair, all groups of a batch row behind each other. `log_multiplicity` fp32, one an
    entry; those of pair `p` and head `i` of its group begin at `offsets[p * heads + i]`."""

    lengths: tuple[int, ...]
    groups: int
    heads: int
    offsets: Tensor
    log_multiplicity: Tensor | None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each pair."""
        return tuple(-(-n // LANES) for n in self.lengths)

    def places(self, keys: Packed, values: Packed) -> tuple[Tensor, tuple[int, ...]]:
        """Where the pairs' codes begin: int64 `[P, 5]`, for each pair its number of rows, its first row, its first word
        of keys and of values, and its first block among all pairs'; and the offsets of the pairs' blocks."""
        device = self.offsets.device
        return _places(self.lengths, self.groups, keys.words_a_block, values.words_a_block, device)


@lru_cache(maxsize=256)
def _places(
    lengths: tuple[int, ...], groups: int, keys: tuple[int, ...], values: tuple[int, ...], device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    bounds = [0, *accumulate(-(-n // LANES) for n in lengths)]
    out = torch.zeros(len(lengths), 5, dtype=torch.int64)
    row, key, value = 0, 0, 0
    for group in range(groups):
        for pair in range(group, len(lengths), groups):
            out[pair] = torch.tensor([lengths[pair], row, key, value, bounds[pair]])
            blocks = bounds[pair + 1] - bounds[pair]
            row, key, value = row + lengths[pair], key + blocks * keys[group], value + blocks * values[group]
    return out.to(device), tuple(bounds)


@lru_cache(maxsize=1024)
def channel_table(segments: tuple[tuple[tuple[int, int], ...], ...], device: torch.device) -> Tensor:
    """For each channel its first word in a block, the distance of its planes, and its width: int32 `[groups, C, 3]`,
    zeros beyond a group's channels."""
    out = torch.zeros(len(segments), max(sum(c for _, c in pairs) for pairs in segments), 3, dtype=torch.int32)
    for group, pairs in enumerate(segments):
        channel, word = 0, 0
        for width, count in pairs:
            out[group, channel : channel + count, 0] = word + torch.arange(count)
            out[group, channel : channel + count, 1:] = torch.tensor([count, width])
            channel, word = channel + count, word + width * count
    return out.to(device)


@lru_cache(maxsize=1024)
def _segment_table(segments: tuple[tuple[tuple[int, int], ...], ...], device: torch.device) -> Tensor:
    out = torch.zeros(len(segments), MAX_SEGMENTS, 2, dtype=torch.int64)
    for group, pairs in enumerate(segments):
        for index, pair in enumerate(pairs):
            out[group, index] = torch.tensor(pair)
    return out.to(device)


@cache
def level_table(device: torch.device) -> Tensor:
    """The Lloyd-Max levels of all widths, fp32: those of width `b` begin at `2 ** b - 1`."""
    return torch.cat([lloyd_max.normal_levels(width).float() for width in range(17)]).to(device)
