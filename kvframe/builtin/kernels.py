"""Kernels that decode a part and attend its entries."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import merge_attention, ragged_attention
from kvframe.stages import Kernel
from kvframe.types import Part

TRITON_FORMATS = ("dense", "int8")


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


class Triton(Kernel):
    """Attends codes where they lie with one Triton loop and a loader for each format (dense, int8), split over entries,
    the query heads of a group sharing each load. For CUDA devices."""

    name: Literal["triton"] = "triton"

    def attend(self, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """See Kernel.attend. Raises InputError for a format without a loader or a device without Triton."""
        return triton_attention(query, part, scale)


class Auto(Kernel):
    """Picks the kernel for each part: `triton` on CUDA devices for the formats that it knows, else `sdpa`."""

    name: Literal["auto"] = "auto"

    def attend(self, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        if query.is_cuda and part.encoded.format in TRITON_FORMATS and find_spec("triton"):
            return triton_attention(query, part, scale)
        return Sdpa().attend(query, part, scale)


def triton_attention(query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """The Triton kernel on a part. Triton is imported here, at its first use."""
    if not find_spec("triton"):
        raise InputError("attention: triton needs the package 'triton', which is not installed; use attention: auto.")
    from kvframe.ops.ragged_attention.triton import ragged_attention as attend

    return attend(query, part.encoded, scale)
