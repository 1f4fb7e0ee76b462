"""Appending packed rows without unpacking them."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 32
LOW = (1 << 32) - 1


def join(first: Tensor, rows_first: int, second: Tensor, rows_second: int) -> Tensor:
    """Return words `[M, W]` that hold the rows of `first [M1, W]` and then those of `second [M2, W]`, int32 bit planes.

    The lanes beyond the rows of either must be zero, as `pack` leaves them if its codes are. If `first` ends within a
    block, the second's planes are shifted into the lanes that are left: codes do not change."""
    begin, shift = divmod(rows_first, LANES)
    if shift == 0 or rows_second == 0:
        return torch.cat([first, second])
    # Full blocks stay as they are, however many there are.
    blocks = -(-(shift + rows_second) // LANES)
    out = torch.zeros(len(second) + 1, first.shape[1], dtype=torch.int64, device=first.device)
    out[0] = first[begin].long() & LOW
    lanes = second.long() & LOW
    out[:-1] |= (lanes << shift) & LOW
    out[1:] |= lanes >> (LANES - shift)
    return torch.cat([first[:begin], torch.where(out >= 1 << 31, out - (1 << 32), out)[:blocks].int()])
