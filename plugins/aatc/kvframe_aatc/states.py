"""From tables and a number of bits to what one layer's codes need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvframe.rope import Rope
from kvframe_aatc.allocation import allocate, high_rate, layer_targets, lower_hull
from kvframe_aatc.coder import Coder
from kvframe_aatc.codespace import Space, space
from kvframe_aatc.quantiser import Channels
from kvframe_aatc.tables import MAX_WIDTH, Side


@dataclass(frozen=True, eq=False)
class Group:
    """The coders of one group of heads."""

    keys: Coder
    values: Coder


@dataclass(frozen=True, eq=False)
class LayerState:
    """What one layer's entries are coded with: the groups, how many KV heads each has, the rotation that is taken off
    the keys first (None = they are coded as cached), and the share of keys and values that is lost."""

    groups: tuple[Group, ...]
    heads: int
    rope: Rope | None
    error: float = 0.0

    @cached_property
    def space(self) -> Space:
        """The maps between heads and codes."""
        return space([(group.keys, group.values) for group in self.groups], self.heads)

    @property
    def kv_heads(self) -> int:
        """`H`."""
        return self.heads * len(self.groups)

    def bits_per_row(self) -> float:
        """Bits of one row of all heads together: codes, scales, and the positions of keys coded before RoPE (one number
        a block)."""
        sides = [coder.channels for group in self.groups for coder in (group.keys, group.values)]
        return sum(c.words + c.scale_bits for c in sides) + (len(self.groups) if self.rope is not None else 0)


@dataclass(frozen=True)
class Spending:
    """How bits are shared out; see the encoder's fields."""

    bits: float
    raised: float
    counted_scale_bits: int
    scope: str
    protected_layers: int
    normalise: bool
    max_width: int
    rd_model: str


def widths(side: Side, spending: Spending) -> Tensor:
    """The width of every channel, int64 `[L, Gr, C]`. Raises StageError if the bits cannot be shared out."""
    layers, groups, channels = side.energy.shape
    energy, weight = side.energy.double(), side.weight.double()
    if spending.normalise:
        energy, weight = (x / _percentile(x) for x in (energy, weight))
    model = high_rate(MAX_WIDTH)
    measured = side.distortion.double()
    curves = measured if spending.rd_model == "empirical" else model.expand_as(measured)
    hulls = _hulls(curves)[..., : spending.max_width + 1]
    overhead = spending.counted_scale_bits * groups
    targets = layer_targets(
        spending.bits, spending.raised, layers, spending.protected_layers, groups * channels, overhead
    )
    return allocate(
        energy * weight, hulls, targets, spending.scope, range(min(spending.protected_layers, layers), layers)
    )


def lost(side: Side, width: Tensor) -> Tensor:
    """The share of each layer's weighted energy that channels of these widths lose, fp64 `[L]`: as measured, but never
    more for more bits, as where there is next to nothing to code."""
    importance = (side.energy * side.weight).double()
    curves = _hulls(side.distortion.double())[:, :, None].expand(*width.shape, -1)
    wrong = importance * curves.gather(-1, width[..., None])[..., 0]
    share = wrong.sum((1, 2)) / importance.sum((1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    return share.clamp_max(1)


def _hulls(curves: Tensor) -> Tensor:
    """The lower hull of each group's distortion by width, `[L, Gr, W + 1]`."""
    return torch.stack([torch.stack([lower_hull(c) for c in row]) for row in curves])


def _percentile(x: Tensor) -> Tensor:
    """The 95th percentile of each layer, `[L, 1, 1]`."""
    value = torch.quantile(x.flatten(1), 0.95, dim=1)
    return torch.where(value > 0, value, 1.0)[:, None, None]


def coder(side: Side, layer: int, group: int, width: Tensor, code: str, one_bit: str, scale: str, bits: int) -> Coder:
    """The coder of one group, given its widths int64 `[C]`; `scale` says which channels the token scale looks at."""
    order = torch.sort(width, descending=True, stable=True).indices
    coded = order[: int((width > 0).sum())]
    silent = order[len(coded) :] if scale == "all" else order[:0]
    looked_at = torch.cat([coded, silent])
    gain = side.gain[layer, group]
    channels = Channels(
        tuple(width[coded].tolist()),
        code,
        side.one_bit[layer, group, coded] if one_bit == "symmetric" and code == "max" else None,
        bits,
        float(side.median[layer, group]),
    )
    return Coder(
        channels,
        (side.analysis[layer, group, looked_at] / gain[looked_at, None]).contiguous(),
        (side.synthesis[layer, group, coded] * gain[coded, None]).contiguous(),
        side.center[layer, group] if bool(side.center[layer, group].any()) else None,
    )
