"""Random rotation, then the best scalar quantiser of a normal variable (TurboQuant without its residual bit)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.bias import UnbiasedEncoder, biased, unbiased
from kvframe.errors import StageError
from kvframe.ops import bitpack, lloyd_max
from kvframe.types import Encoded, Entries, ModelInfo
from kvframe_baselines.blocks import decoded, encoded, join_rows, pack_rows, runs_of, select_rows, unpack_rows

SIDES = ("keys", "values")


class Rotation(UnbiasedEncoder):
    """Rotates keys and values by a Hadamard matrix with random signs, which makes their channels nearly normal, and
    codes each with the Lloyd-Max levels of N(0, 1) times the row's root mean square."""

    name: Literal["baselines.rotation"] = "baselines.rotation"
    paper: ClassVar[str] = "Zandieh et al., 2025, arXiv 2504.19874"
    block: ClassVar[int] = bitpack.LANES

    bits: int = Field(2, ge=1, le=8, description="Bits of each channel; 16 more for each key and each value.")
    seed: int = Field(0, ge=0, description="From which the signs are drawn.")

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return words `[M, bits, D]` and bfloat16 scales `[N, 1]` of keys and values."""
        runs, codes = runs_of(entries.bounds), {}
        borders = lloyd_max.normal_borders(self.bits).float().to(entries.keys.device)
        for side, rows in zip(SIDES, unbiased(entries, state), strict=True):
            turned = rows @ rotation(rows.shape[1], self.seed, rows.device)
            scale = turned.square().mean(-1, keepdim=True).sqrt().to(torch.bfloat16)
            if not bool(scale.isfinite().all()):
                raise StageError("Keys or values to be coded hold infinities or NaN, which no code can carry.")
            safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
            numbers = torch.bucketize(turned / safe, borders).to(torch.uint8)
            codes[side], codes[f"{side}_scale"] = pack_rows(numbers, self.bits, runs), scale
        return encoded(entries, codes, "rotation")

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return levels times scale, turned back."""
        runs, codes = runs_of(encoded.bounds), encoded.codes
        levels = lloyd_max.normal_levels(self.bits).float().to(encoded.offsets.device)

        def side(name: str) -> Tensor:
            rows = levels[unpack_rows(codes[name], self.bits, runs).long()] * codes[f"{name}_scale"].float()
            return rows @ rotation(rows.shape[1], self.seed, rows.device).T

        return decoded(encoded, *biased(encoded, side("keys"), side("values"), state))

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded:
        """Rows behind rows; nothing is coded anew."""
        return join_rows(first, second, SIDES)

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: Any) -> Encoded:
        """See Encoder.select."""
        return select_rows(encoded, rows, batch, SIDES)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return `bits` a channel and 16 for each key and each value."""
        return 2 * (self.bits * model.head_dim + 16)


@cache
def rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """An orthogonal fp32 `[D, D]`: random signs, then Hadamard matrices on blocks of the largest power of two in D."""
    size = dim & -dim
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    blocks = torch.block_diag(*[hadamard / size**0.5] * (dim // size))
    return (signs[:, None] * blocks).float().to(device)
