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
        latent = self.analysis @ (rows if self.center is None else rows - self.center).T  # [C', R]
        stored = self.channels.scale(latent)
        codes = self.channels.codes(latent[: len(self.synthesis)], self.channels.loaded(stored))
        return self.channels.pack(runs.pad(codes)), stored

    def decode(self, words: Tensor, stored: Tensor, runs: bitpack.Runs) -> Tensor:
        """Return fp32 rows `[R, E]`."""
        scale = self.channels.loaded(stored)[:, None]
        segments = self.channels.unpack(words)
        if not segments:
            rows = scale.new_zeros(len(scale), self.synthesis.shape[1])
        elif self.channels.code == "max":
            synthesis, first = self._folded
            latent = torch.cat([codes.float() for codes in segments])  # [C, M * 32]
            rows = torch.addmm(first, runs.trim(latent).T, synthesis).mul_(scale)
        else:
            rows = (runs.trim(self.channels.meant(_together(segments))).T @ self.synthesis).mul_(scale)
        return rows if self.center is None else rows.add_(self.center)

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor]:
        """Step and first level of linear codes, moved into the matrix: a row is `u @ matrix + first`."""
        _, _, _, step, first = self.channels.moved(self.synthesis.device)
        return step * self.synthesis, (first * self.synthesis).sum(0)


def _together(segments: Sequence[Tensor]) -> Tensor:
    """Codes of all widths in one tensor; several widths may have several dtypes."""
    kinds = {codes.dtype for codes in segments}
    return torch.cat(list(segments) if len(kinds) == 1 else [codes.int() for codes in segments])
