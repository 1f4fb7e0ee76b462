"""One group of heads: the latent of its keys or values, coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvframe.ops import bitpack
from kvframe_aatc.quantiser import Channels


@dataclass(frozen=True, eq=False)
class Coder:
    """Codes vectors `[R, E]` of one group of heads (`E = n * D`), and gives them back.

    Attributes:
        channels: the coded channels, `C` of them.
        analysis: fp32 `[C', E]`, rows divided by the channels' gains; rows beyond `C` are channels without bits that
            the token scale looks at all the same.
        synthesis: fp32 `[C, E]`, rows times the gains.
        center: fp32 `[E]`, taken off before and added after (a projection's bias, a mean); None = zero.
    """

    channels: Channels
    analysis: Tensor
    synthesis: Tensor
    center: Tensor | None

    def encode(self, rows: Tensor, runs: bitpack.Runs) -> tuple[Tensor, Tensor]:
        """Return words int32 `[M, W]` and stored scales `[R]` of `rows [R, E]`."""
        centred = rows if self.center is None else rows - self.center
        blocks = runs.pad(centred, 0).contiguous().unflatten(0, (-1, bitpack.LANES)).transpose(1, 2)  # [M, E, 32]
        lanes = blockwise(self.analysis, blocks).transpose(0, 1).flatten(1)  # [C', M * 32]
        stored = runs.trim(self.channels.scale(lanes), 0)
        latent = runs.trim(lanes)
        codes = self.channels.codes(latent[: len(self.synthesis)], self.channels.loaded(stored))
        return self.channels.pack(runs.pad(codes)), stored

    def decode(self, words: Tensor, stored: Tensor, runs: bitpack.Runs) -> Tensor:
        """Return fp32 rows `[R, E]`."""
        scale = self.channels.loaded(stored)[:, None]
        segments = self.channels.unpack(words)
        if not segments:
            rows = scale.new_zeros(len(scale), self.synthesis.shape[1])
        elif self.channels.code == "max":
            matrix, first = self._folded
            rows = _rows(matrix, torch.cat([codes.float() for codes in segments]), runs).add_(first).mul_(scale)
        else:
            rows = _rows(self.synthesis.T, self.channels.meant(_together(segments)), runs).mul_(scale)
        return rows if self.center is None else rows.add_(self.center)

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor]:
        """Step and first level of linear codes, moved into the matrix `[E, C]`: a row is `matrix @ u + first`."""
        _, _, _, step, first = self.channels.moved(self.synthesis.device)
        return (step * self.synthesis).T.contiguous(), (first * self.synthesis).sum(0)


def blockwise(matrix: Tensor, blocks: Tensor) -> Tensor:
    """`matrix [O, I]` times each of `blocks [M, I, 32]`, `[M, O, 32]`. A product of all blocks at once may be added up
    in another order if there are more of them; so a row gives the same bits whatever stands beside its block."""
    return torch.bmm(matrix.expand(len(blocks), *matrix.shape), blocks)


def _rows(matrix: Tensor, lanes: Tensor, runs: bitpack.Runs) -> Tensor:
    """Rows `[R, E]`: `matrix [E, C]` times what the lanes `[C, M * 32]` hold."""
    blocks = lanes.unflatten(1, (-1, bitpack.LANES)).transpose(0, 1)
    return runs.trim(blockwise(matrix, blocks).transpose(1, 2).flatten(0, 1), 0)


def _together(segments: Sequence[Tensor]) -> Tensor:
    """Codes of all widths in one tensor; several widths may have several dtypes."""
    kinds = {codes.dtype for codes in segments}
    return torch.cat(list(segments) if len(kinds) == 1 else [codes.int() for codes in segments])
