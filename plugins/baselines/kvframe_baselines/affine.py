"""Asymmetric integer codes: a smallest value and a step for each group, in float16 as the methods' own code has it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.errors import StageError

LARGEST = torch.finfo(torch.float16).max


def affine_codes(values: Tensor, bits: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes uint8 of fp32 `values`, given each group's smallest and largest value (broadcast to them); returns
    `(codes, low, step)`, the latter two in float16 and at most its largest number.

    The codes are those that fit the rounded `low` and `step`. Raises StageError for values that are not finite."""
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise StageError(
            "Keys or values to be coded hold infinities or NaN, which no code can carry; run the model in bfloat16 or "
            "float32 if it overflows in float16."
        )
    stored_low = low.clamp(-LARGEST, LARGEST).half()
    step = ((high - stored_low.float()) / (2**bits - 1)).clamp(0, LARGEST).half()
    safe = torch.where(step == 0, torch.ones_like(step), step).float()
    codes = ((values - stored_low.float()) / safe).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), stored_low, step


def affine_values(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """fp32 values that the codes stand for."""
    return codes.float() * step.float() + low.float()
