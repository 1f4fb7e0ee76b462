"""Cuts a list of entries into chunks and each chunk into sources and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Partition = Literal["alternating", "halves", "random"]


@dataclass(frozen=True, eq=False)
class Sides:
    """The two sides of `P` chunks: `sources` int64 `[P, a]` and `targets` int64 `[P, b]` are indices of entries,
    -1 = none."""

    sources: Tensor
    targets: Tensor


def places(label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For `label [M]`, equal ones next to each other: the run that each item is in (int64 `[M]`), its place in that run
    (int64 `[M]`), and the lengths of the runs (int64 `[P]`)."""
    items = torch.arange(len(label), device=label.device)
    if len(label) == 0:
        return items, items, items
    run = torch.zeros_like(items)
    torch.cumsum(label[1:] != label[:-1], 0, out=run[1:])
    length = run.bincount()
    first = length.cumsum(0) - length
    return run, items - first[run], length


def split_chunks(label: Tensor, partition: Partition, draw: Tensor | None = None) -> Sides:
    """Cut entries into the runs of equal `label` int64 `[M]`, and every run of `n` entries into two sides:

        alternating: places 0, 2, 4, … are sources, 1, 3, 5, … targets
        halves: the first n // 2 are sources, the others targets
        random: as alternating, after the entries were put into the order of `draw` int64 `[M]`

    Both sides keep the order of the entries (with "random" that of the draw)."""
    run, place, length = places(label)
    if partition == "random" and draw is not None:
        shuffled = draw.argsort(stable=True)
        shuffled = shuffled[run[shuffled].argsort(stable=True)]
        place = torch.empty_like(place).scatter_(0, shuffled, place)
    if partition == "halves":
        half = (length // 2)[run]
        is_source = place < half
        slot = torch.where(is_source, place, place - half)
    else:
        is_source = place % 2 == 0
        slot = place // 2
    return Sides(_side(is_source, run, slot, len(length)), _side(~is_source, run, slot, len(length)))


def _side(member: Tensor, run: Tensor, slot: Tensor, runs: int) -> Tensor:
    """The members of one side as `[P, largest side]`."""
    items = member.nonzero().squeeze(1)
    width = int(slot[items].max()) + 1 if len(items) else 0
    out = items.new_full((runs, width), -1)
    out[run[items], slot[items]] = items
    return out


def scramble(seed: int, turn: int, unit: Tensor, rank: Tensor) -> Tensor:
    """Pseudo-random int64 `[M]` that depend on the four numbers only, so that a row draws the same in any batch."""
    mixed = unit * 0x1F123BB5159A55E5 + rank * 0x3C6EF372FE94F82B + (seed * 0x2545F491 + turn * 0x9E3779B1)
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D), (33, 1)):
        mixed = (mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)) * factor
    return mixed
