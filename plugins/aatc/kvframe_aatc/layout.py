"""How the entries of a layer lie in the codes: group after group of heads, in each batch row after batch row, in blocks
of 32 rows. A row is what the heads of a group hold at one place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import bitpack


def group_runs(bounds: tuple[int, ...], kv_heads: int, heads: int) -> list[bitpack.Runs]:
    """For each group of `heads` KV heads the number of rows in each batch row, given the entries' offsets.

    Raises StageError if heads of one group hold different numbers of entries."""
    counts = [end - begin for begin, end in pairwise(bounds)]
    groups = []
    for first in range(0, kv_heads, heads):
        lengths = []
        for row in range(len(counts) // kv_heads):
            members = counts[row * kv_heads + first : row * kv_heads + first + heads]
            if len(set(members)) != 1:
                raise StageError(
                    f"KV heads {first} to {first + heads - 1} are coded jointly, but hold {members} entries; "
                    "set encoder.joint_heads: 1."
                )
            lengths.append(members[0])
        groups.append(bitpack.Runs(tuple(lengths)))
    return groups


def gather(rows: Tensor, bounds: tuple[int, ...], kv_heads: int, heads: int, group: int) -> Tensor:
    """The rows `[N, D]` of one group of heads as `[n, R, D]`."""
    pieces = []
    for first in range(group * heads, len(bounds) - 1, kv_heads):
        begin, end = bounds[first], bounds[first + heads]
        pieces.append(rows[begin:end].view(heads, (end - begin) // heads, rows.shape[1]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def scatter(groups: list[Tensor], runs: list[bitpack.Runs]) -> Tensor:
    """The inverse of `gather` over all groups: rows `[N, D]` packed by (b, h) from `[n, R_g, D]` of each group."""
    split = [group.split(run.lengths, 1) for group, run in zip(groups, runs, strict=True)]
    pieces = [piece.reshape(-1, piece.shape[-1]) for row in zip(*split, strict=True) for piece in row]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def windows(runs: list[bitpack.Runs], size: int) -> Iterator[list[list[tuple[int, int]]]]:
    """Cut all runs into windows of `size` rows (whole blocks): for each window the `(begin, end)` of each group and
    batch row, within its run. One empty window if there is nothing."""
    longest = max((n for run in runs for n in run.lengths), default=0)
    for begin in range(0, max(longest, 1), size):
        yield [[(min(begin, n), min(begin + size, n)) for n in run.lengths] for run in runs]


def pick(tensor: Tensor, lengths: tuple[int, ...], ranges: list[tuple[int, int]], unit: int) -> Tensor:
    """The rows (`unit` 1) or blocks (`unit` 32) of each run that belong to the ranges of rows, joined."""
    pieces, start = [], 0
    for length, (begin, end) in zip(lengths, ranges, strict=True):
        first = start + begin // unit
        pieces.append(tensor[first : start + -(-end // unit) if end > begin else first])
        start += -(-length // unit)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_positions(positions: Tensor, runs: bitpack.Runs) -> tuple[Tensor, Tensor]:
    """Positions int `[R]` as one int32 a block and, unless they count up by one in every block, the bits that each
    row's distance from it takes: `[M]` and `[M, w]`."""
    blocks = sum(runs.blocks)
    lanes = runs.pad(positions.long()[None])[0].view(blocks, bitpack.LANES)
    held = runs.pad(torch.ones_like(positions, dtype=torch.int64)[None])[0].view(blocks, bitpack.LANES) > 0
    lowest = torch.where(held, lanes, 1 << 40).amin(1)
    distance = torch.where(held, lanes - lowest[:, None], 0)  # [M, 32]
    counting = torch.arange(bitpack.LANES, device=positions.device)
    if blocks == 0 or bool(torch.where(held, distance == counting, True).all()):
        return lowest.int(), lowest.new_zeros(blocks, 0, dtype=torch.int32)
    width = max(1, int(distance.max()).bit_length())
    planes = [
        bitpack.pack(((distance >> first) & 0xFFFF).view(1, -1).int(), min(16, width - first)).flatten(1)
        for first in range(0, width, 16)
    ]
    return lowest.int(), torch.cat(planes, 1)


def continued(starts: Tensor, runs: bitpack.Runs, more_starts: Tensor, more: bitpack.Runs) -> Tensor | None:
    """The joined blocks' starts, if every run's positions count up by one from its last block through all that is
    appended to it; None if not. Then no position need be unpacked. `starts [M]`, `more_starts [M']`."""
    if 0 in runs.lengths or 0 in more.lengths:
        return None
    last = torch.tensor(runs.blocks, device=starts.device).cumsum(0) - 1
    held = torch.tensor([1 + (n - 1) % bitpack.LANES for n in runs.lengths], device=starts.device)
    numbers = torch.cat([torch.arange(n, device=starts.device) for n in more.blocks])
    expected = (starts[last] + held).repeat_interleave(torch.tensor(more.blocks, device=starts.device))
    if not torch.equal((expected + bitpack.LANES * numbers).to(more_starts), more_starts):
        return None
    pieces, both = starts.split(runs.blocks), (runs + more).blocks
    counted = bitpack.LANES * torch.arange(1, max(both) + 1, device=starts.device, dtype=starts.dtype)
    joined = [x for piece, n in zip(pieces, both, strict=True) for x in (piece, piece[-1] + counted[: n - len(piece)])]
    return torch.cat(joined)


def unpack_positions(lowest: Tensor, distances: Tensor, runs: bitpack.Runs) -> Tensor:
    """The positions int64 `[R]` again."""
    blocks, width = distances.shape
    if width == 0:
        distance = torch.arange(bitpack.LANES, device=lowest.device).expand(blocks, -1)
    else:
        # Done at every step for few rows, where fewer calls count for more than fewer operations.
        lane, plane = (torch.arange(n, dtype=torch.int32, device=lowest.device) for n in (bitpack.LANES, width))
        distance = (((distances[:, :, None] >> lane) & 1) << plane[:, None]).sum(1)
    return runs.trim((lowest.long()[:, None] + distance).reshape(1, -1))[0]
