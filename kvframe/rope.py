"""Rotary position embedding: rotate keys to a position and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from kvframe.errors import StageError


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one layer, in the half-split convention (channel `i` is paired with `i + R/2`).

    Attributes:
        inv_freq: fp32 `[R/2]`, radians per position, with the model's own scaling (llama3, yarn, …) applied. Channels
            beyond `R` are left as they are; with `R` 0 nothing is rotated.
        scaling: factor that the model applies together with the rotation (yarn's attention factor; else 1).
    """

    inv_freq: Tensor
    scaling: float = 1.0

    # What has __getitem__ but no end would be iterated over for ever.
    __iter__ = None

    def __getitem__(self, layer: int) -> Rope:
        """The rotation of compressed layer `layer`, 0 to L-1: this one, which serves all of them."""
        return self

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

    def equals(self, other: Rope) -> bool:
        """Whether both rotate alike."""
        if self is other or self.inv_freq.device.type == "meta":  # without numbers only the shape is known
            return self is other or self.inv_freq.shape == other.inv_freq.shape
        return self.scaling == other.scaling and torch.equal(self.inv_freq, other.inv_freq)


@dataclass(frozen=True, eq=False)
class LayerRopes:
    """The rotations of a model whose layers rotate differently, or not at all: one Rope for each of the `L` compressed
    layers. There is no rotation of the model as a whole: asking for one raises StageError."""

    layers: tuple[Rope, ...]

    def __getitem__(self, layer: int) -> Rope:
        """The rotation of compressed layer `layer`, 0 to L-1."""
        return self.layers[layer]

    def rotate(self, x: Tensor, positions: Tensor) -> NoReturn:
        """Raises StageError: a layer must be named."""
        self._refuse()

    def unrotate(self, x: Tensor, positions: Tensor) -> NoReturn:
        """Raises StageError: a layer must be named."""
        self._refuse()

    @property
    def inv_freq(self) -> NoReturn:
        """Raises StageError: a layer must be named."""
        self._refuse()

    @property
    def scaling(self) -> NoReturn:
        """Raises StageError: a layer must be named."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StageError(
            "The layers of this model rotate their keys differently, so the model has no rotation as a whole; use that "
            "of the layer, model.rope[layer]."
        )


def of_layers(ropes: Sequence[Rope]) -> Rope | LayerRopes:
    """The rotation of a model whose compressed layers have these: one Rope if all are alike."""
    return ropes[0] if all(rope.equals(ropes[0]) for rope in ropes[1:]) else LayerRopes(tuple(ropes))
