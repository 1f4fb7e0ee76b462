"""Rotary position embedding: rotate keys to a position and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one model, in the half-split convention (channel `i` is paired with `i + R/2`).

    Attributes:
        inv_freq: fp32 `[R/2]`, radians per position, with the model's own scaling (llama3, yarn, …) applied. Channels
            beyond `R` are left as they are.
        scaling: factor that the model applies together with the rotation (yarn's attention factor; else 1).
    """

    inv_freq: Tensor
    scaling: float = 1.0

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x [..., T, D]` to integer `positions` that broadcast to `[..., T]`. Computed in fp32 (fp64 for fp64
        input), returned in that precision."""
        return self._turn(x, positions, +1.0, self.scaling)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `rotate`."""
        return self._turn(x, positions, -1.0, 1.0 / self.scaling)

    def factors(self, count: int) -> tuple[Tensor, Tensor]:
        """The cosines and sines fp32 `[count, R/2]` that `rotate` multiplies with at positions 0 to `count - 1`."""
        positions = torch.arange(count, device=self.inv_freq.device)
        angle = positions[:, None].float() * self.inv_freq
        return angle.cos() * self.scaling, angle.sin() * self.scaling

    def _turn(self, x: Tensor, positions: Tensor, direction: float, factor: float) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        # The angle is rounded to fp32 as the model rounds it, so that unrotate inverts what the model did.
        angle = positions[..., None].float() * self.inv_freq.to(x.device)  # [..., T, R/2]
        cos = (angle.to(x.dtype).cos() * factor).to(x.dtype)
        sin = (angle.to(x.dtype).sin() * (factor * direction)).to(x.dtype)
        half = self.inv_freq.shape[0]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*turned, rest.expand(*turned[0].shape[:-1], -1)], dim=-1)
