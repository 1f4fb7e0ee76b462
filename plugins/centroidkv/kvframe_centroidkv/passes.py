"""Passes of chunked soft matching over one flat list of entries, until every group has come down to its target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import soft_matching
from kvframe_centroidkv.partition import places, scramble, split_chunks
from kvframe_centroidkv.ranking import highest

if TYPE_CHECKING:
    from kvframe_centroidkv.allocator import SoftMatching


@dataclass(frozen=True, eq=False)
class Work:
    """What is to be clustered: `M` entries of `U` units (one unit = one KV head of one layer and batch row), sorted by
    unit, then position.

    Attributes:
        sums: fp32 or fp64 `[M, D]`, for each entry the sum of the keys of its tokens; used up.
        counts: like `sums`, `[M]`, tokens that an entry stands for.
        unit: int64 `[M]`.
        segment: int64 `[M]`, the chunk of each entry in the first pass; never decreases inside a unit.
        chunk: int64 `[U]`, entries in a chunk of the later passes.
        stream: int64 `[U]`, what the random partition of a unit depends on.
        group: int64 `[U]`, the units that share a target.
        target: int64 `[G]`, entries that a group may have; at least one for each of its units that has entries.
    """

    sums: Tensor
    counts: Tensor
    unit: Tensor
    segment: Tensor
    chunk: Tensor
    stream: Tensor
    group: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class Clusters:
    """The outcome: `owner` int64 `[M]`, the cluster of each entry, of `E`; `unit` int64 `[E]`, never decreasing; and
    the number of passes."""

    owner: Tensor
    unit: Tensor
    passes: int


def cluster(work: Work, method: SoftMatching) -> Clusters:
    """Merge entries pass by pass until each group has at most `target` of them.

    One pass: in each chunk every source finds its best target; of a group's edges the most confident ones are taken, at
    most `max_share` of its sources, at most as many as there are entries too many, and in the passes that have a
    threshold only those above it. Several sources may join one target; the centroid is the mean weighted by counts,
    and stays at the target's place. Raises StageError if a target cannot be reached."""
    sums, counts, unit = work.sums, work.counts.clone(), work.unit
    owner = torch.arange(len(unit), device=unit.device)
    alive = owner  # entries that are left; rows of the others stay where they are, which is cheaper than closing up
    width = int(work.segment.max()) + 1 if len(unit) else 1
    label = unit * width + work.segment
    limit, turn = 0, 0
    while True:
        excess = torch.bincount(work.group[unit.index_select(0, alive)], minlength=len(work.target)) - work.target
        most = int(excess.max()) if len(excess) else 0
        if most <= 0:
            number = torch.zeros_like(unit).scatter_(0, alive, torch.arange(len(alive), device=unit.device))
            return Clusters(number[owner], unit[alive], turn)
        limit = limit or turn_limit(most, method.max_share, len(method.steps))
        if turn == limit:
            raise StageError(
                f"{method.name} has {most} entries more than its budget after {turn} passes; this is a fault of the "
                "stage, not of the input: please report it with the spec."
            )
        where = unit.index_select(0, alive)
        rank = places(where)[1]
        if turn:
            label = where * (len(unit) + 1) + rank // work.chunk[where]
        draw = scramble(method.seed, turn, work.stream[where], rank) if method.partition == "random" else None
        sides = split_chunks(label, method.partition, draw)
        sources, targets = pick(alive, sides.sources), pick(alive, sides.targets)
        likeness, partner = match(sums, counts, sources, targets, method)
        found = partner >= 0
        source, target, likeness = sources[found], partner[found], likeness[found]
        group = work.group[unit.index_select(0, source)]
        cap = (torch.bincount(group, minlength=len(excess)) * method.max_share).ceil().long()
        if turn < len(method.steps):
            sure = likeness >= method.steps[turn]
            source, target, likeness, group = source[sure], target[sure], likeness[sure], group[sure]
        chosen = highest(likeness, group, torch.minimum(excess.clamp_min(0), cap))
        source, target = source[chosen], target[chosen]
        sums.index_add_(0, target, sums.index_select(0, source))
        counts.index_add_(0, target, counts[source])
        into = torch.arange(len(unit), device=unit.device).index_copy_(0, source, target)
        owner = into.index_select(0, owner)
        alive = alive[into.index_select(0, alive) == alive]
        turn += 1


def pick(items: Tensor, index: Tensor) -> Tensor:
    """`items[index]`, -1 where the index is; faster than indexing on a CPU."""
    found = items.index_select(0, index.clamp_min(0).flatten()).view(index.shape)
    return torch.where(index < 0, -1, found)


def match(
    sums: Tensor, counts: Tensor, sources: Tensor, targets: Tensor, method: SoftMatching
) -> tuple[Tensor, Tensor]:
    """Soft matching of centroids. The cosine does not depend on their length, so that sums do as well."""
    rows = sums if method.similarity == "cosine" else sums / counts[:, None]
    return soft_matching(rows, sources, targets, method.similarity, counts)


def turn_limit(excess: int, max_share: float, thresholds: int) -> int:
    """Passes that are always enough for `excess` entries too many.

    Chunks of n >= 2 entries have at least half of n - 1 sources with a target, so a pass without a threshold takes
    `max_share / 2` of what is in excess of one entry a unit, and at least one. The first pass may do nothing: the
    segmenter's chunks may be of one token."""
    rate = 1 - max_share / 2
    return thresholds + 2 + math.ceil(math.log(excess) / -math.log(rate)) + math.ceil(2 / max_share)
