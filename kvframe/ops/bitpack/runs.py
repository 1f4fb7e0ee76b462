"""Rows of several runs, each run padded to whole blocks of 32 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvframe.ops.bitpack.join import LANES, join


@dataclass(frozen=True)
class Runs:
    """The rows of each run (such as one batch row's), in order. Blocks of a run never hold another's rows, so that each
    can be appended to."""

    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """`R`, rows of all runs."""
        return sum(self.lengths)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each run."""
        return tuple(-(-n // LANES) for n in self.lengths)

    @cached_property
    def _pieces(self) -> list[tuple[int, int, int]]:
        """Of each run: its first row, its first lane, and how many rows it has."""
        pieces, row, lane = [], 0, 0
        for length, blocks in zip(self.lengths, self.blocks, strict=True):
            pieces.append((row, lane, length))
            row, lane = row + length, lane + blocks * LANES
        return pieces

    @property
    def padded(self) -> bool:
        """Whether any block is not full."""
        return any(n % LANES for n in self.lengths)

    def pad(self, rows: Tensor, dim: int = 1) -> Tensor:
        """`R` rows along `dim` (by default columns, `[C, R]`) to `M * 32` lanes, zero where no row is."""
        if not self.padded:
            return rows
        shape = list(rows.shape)
        shape[dim] = sum(self.blocks) * LANES
        lanes = rows.new_zeros(shape)
        for row, lane, count in self._pieces:
            lanes.narrow(dim, lane, count).copy_(rows.narrow(dim, row, count))
        return lanes

    def trim(self, lanes: Tensor, dim: int = 1) -> Tensor:
        """`M * 32` lanes along `dim` back to the `R` rows."""
        if not self.padded:
            return lanes
        return torch.cat([lanes.narrow(dim, lane, count) for _, lane, count in self._pieces], dim)

    def join(self, words: Tensor, other: Runs, more: Tensor) -> Tensor:
        """Words `[M, W]` of these runs, each followed by the other's run of the same number (`more [M', W]`)."""
        first, second = words.split(self.blocks), more.split(other.blocks)
        return torch.cat(
            [join(a, n, b, m) for a, n, b, m in zip(first, self.lengths, second, other.lengths, strict=True)]
        )

    def join_rows(self, rows: Tensor, other: Runs, more: Tensor) -> Tensor:
        """As `join`, for tensors with one entry `[R, …]` a row."""
        first, second = rows.split(self.lengths), more.split(other.lengths)
        return torch.cat([piece for pair in zip(first, second, strict=True) for piece in pair])

    def __add__(self, other: Runs) -> Runs:
        return Runs(tuple(a + b for a, b in zip(self.lengths, other.lengths, strict=True)))

    def select(self, words: Tensor, runs: Sequence[int]) -> Tensor:
        """Words `[M, …]` of these runs alone, in this order."""
        pieces = words.split(self.blocks)
        return torch.cat([pieces[run] for run in runs])

    def select_rows(self, rows: Tensor, runs: Sequence[int]) -> Tensor:
        """As `select`, for tensors with one entry `[R, …]` a row."""
        pieces = rows.split(self.lengths)
        return torch.cat([pieces[run] for run in runs])
