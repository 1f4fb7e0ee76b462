"""The specification of the packed layout: bit planes of 32 rows."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 32


def pack(codes: Tensor, width: int) -> Tensor:
    """Return words int32 `[M, width, C]` of unsigned `codes [C, M * 32]`, each below `2 ** width`.

    Bit `i` of word `[m, j, c]` is bit `j` of the code of channel `c` in row `32 * m + i`: `width` words hold 32 rows of
    a channel, for any width, and no bit is wasted."""
    channels = codes.shape[0]
    lanes = codes.reshape(channels, -1, LANES).long()  # [C, M, 32]
    weight = torch.ones((), dtype=torch.int64, device=codes.device) << torch.arange(LANES, device=codes.device)
    words = torch.zeros(lanes.shape[1], width, channels, dtype=torch.int64, device=codes.device)
    for plane in range(width):
        words[:, plane] = (((lanes >> plane) & 1) * weight).sum(-1).T
    # The 32nd bit is the sign of an int32; the others keep their places.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack(words: Tensor, width: int) -> Tensor:
    """Return the codes `[C, M * 32]` again, uint8 up to 8 bits and int32 beyond."""
    blocks, _, channels = words.shape
    row = torch.arange(LANES, device=words.device)
    codes = torch.zeros(channels, blocks, LANES, dtype=torch.int64, device=words.device)
    for plane in range(width):
        codes |= ((words[:, plane].T[..., None].long() >> row) & 1) << plane
    return codes.reshape(channels, blocks * LANES).to(torch.uint8 if width <= 8 else torch.int32)
