"""Kernels that attend a part: decoded, or as its encoder can."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvframe import capping
from kvframe.errors import InputError
from kvframe.ops import merge_attention, native, ragged_attention
from kvframe.stages import Kernel
from kvframe.types import Part

# A pass over entries pays off for few queries a KV head; many are a matrix product, which torch's libraries do best.
FEW_QUERIES = 32
# Below, a step's time is that of the calls, whatever they do: for codes, and for entries held as they are.
WORTH_A_KERNEL = 64, 1024


class Reference(Kernel):
    """Decodes the part, then attends one head after the other in fp32. The specification that other kernels match."""

    name: Literal["reference"] = "reference"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        return ragged_attention(query, part.decode(), scale, "reference", softcap)


class Sdpa(Kernel):
    """Decodes the part tile by tile and attends each with torch's fused attention: one call if every head holds
    equally many entries, else one call a head. Entries held densely are attended where they lie."""

    name: Literal["sdpa"] = "sdpa"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        return _decoded(query, part, scale, softcap)


class Triton(Kernel):
    """Attends codes where they lie, split over entries, the query heads of a group sharing each load. For CUDA devices
    and encoders that have a way in Triton (dense, int8 and more)."""

    any_format: ClassVar[bool] = False

    name: Literal["triton"] = "triton"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """See Kernel.attend. Raises InputError for an encoder without such a way, or a device without Triton."""
        if not find_spec("triton"):
            raise InputError(
                "attention: triton needs the package 'triton', which is not installed; use attention: auto."
            )
        return _by_name(query, part, scale, "triton", softcap)


class Cpu(Kernel):
    """Attends codes where they lie in one pass on a CPU, ragged or not, without decoding them. Needs numba, and an
    encoder that has a way of this kind (dense, int8 and more)."""

    any_format: ClassVar[bool] = False

    name: Literal["cpu"] = "cpu"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """See Kernel.attend. Raises InputError without numba, for an encoder without such a way, or another device."""
        if not native.available():
            raise InputError(
                f"attention: cpu needs the package 'numba', which cannot be used here; {native.INSTALL}, or use "
                "attention: auto."
            )
        return _by_name(query, part, scale, "cpu", softcap)


class Auto(Kernel):
    """Picks the way for each part: as its encoder can on this device (`triton` on CUDA devices; `cpu` for a few queries
    on many entries), else `sdpa`."""

    name: Literal["auto"] = "auto"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """See Kernel.attend."""
        impl = _impl(query, part)
        if impl and (softcap is None or capping.takes(type(part.encoder))):
            try:
                found = _coded(query, part, scale, impl, softcap)
            except InputError:  # a dtype or layout that only the decoded way can take
                found = None
            if found is not None:
                return found
        return _decoded(query, part, scale, softcap)


def _impl(query: Tensor, part: Part) -> str | None:
    """Which way of the encoder's own suits the device and the sizes."""
    if query.dtype == torch.float64:
        return None
    if query.is_cuda:
        return "triton" if find_spec("triton") else None
    if query.device.type != "cpu" or part.encoded.bounds[-1] < WORTH_A_KERNEL[part.encoder.views]:
        return None
    batch, query_heads, length, _ = query.shape
    few = batch * query_heads * length <= FEW_QUERIES * (len(part.encoded.bounds) - 1)
    return "cpu" if few and native.available() else None


def _decoded(query: Tensor, part: Part, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    return merge_attention([ragged_attention(query, tile, scale, "sdpa", softcap) for tile in part.tiles()])


def _coded(query: Tensor, part: Part, scale: float, impl: str, softcap: float | None) -> tuple[Tensor, Tensor] | None:
    return part.encoder.attend(query, part.encoded, part.state, scale, impl, **capping.keywords(softcap))


def _by_name(query: Tensor, part: Part, scale: float, impl: str, softcap: float | None) -> tuple[Tensor, Tensor]:
    if softcap is not None and not capping.takes(type(part.encoder)):
        raise InputError(
            f"The encoder '{part.encoder.name}' attends its codes without a cap on logits, which the model has; use "
            "attention: auto, which decodes them, or give its attend the argument softcap: float | None = None."
        )
    found = _coded(query, part, scale, impl, softcap)
    if found is None:
        raise InputError(
            f"The {impl} kernel has no loader for the format '{part.encoded.format}' of the encoder "
            f"'{part.encoder.name}'; use attention: auto."
        )
    return found
