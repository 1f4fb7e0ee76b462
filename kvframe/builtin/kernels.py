"""Kernels that decode a part and attend its entries."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvframe.ops import merge_attention, ragged_attention
from kvframe.stages import Kernel
from kvframe.types import Part


class Reference(Kernel):
    """Decodes the part, then attends one head after the other in fp32. The specification that other kernels match."""

    name: Literal["reference"] = "reference"

    def attend(self, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        return ragged_attention(query, part.decode(), scale, impl="reference")


class Sdpa(Kernel):
    """Decodes the part tile by tile and attends each with torch's fused attention: one call if every head holds
    equally many entries, else one call a head. Entries held densely are attended where they lie."""

    name: Literal["sdpa"] = "sdpa"

    def attend(self, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        return merge_attention([ragged_attention(query, tile, scale, impl="sdpa") for tile in part.tiles()])


class Auto(Kernel):
    """Picks the fastest kernel for each part and device. Today that is `sdpa` everywhere."""

    name: Literal["auto"] = "auto"

    def attend(self, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        return Sdpa().attend(query, part, scale)
