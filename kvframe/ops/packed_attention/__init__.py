"""Attention in code space: queries meet packed codes, and weights gather them, without a key or a value rebuilt.

An encoder whose vectors are `s A^T l(u)`, a linear map of the levels that codes `u` stand for, times a scale `s` a row,
brings `A q` as the query and maps what comes out: `q.k = s (A q).l(u)`, and `sum w v = A^T sum (w s) l(u)`."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import native
from kvframe.ops.packed_attention.layout import Packed, PackedRows

IMPLEMENTATIONS = ("reference", "cpu", "triton")


def packed_attention(
    query: Tensor, constant: Tensor, keys: Packed, values: Packed, rows: PackedRows, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attend the rows of `P` pairs (of a batch row and a group of heads) with queries in code space.

    Args:
        query: fp32 `[P, M, C]`, times the softmax's scale; zero beyond a group's own channels.
        constant: fp32 `[P, M]`, added to the product before it is multiplied by the key's scale.
        keys, values: the codes of all groups.
        rows: how many rows each pair has, and their log multiplicities.
        impl: "reference", "cpu" (numba), "triton", or "auto": what is there for the device.

    Returns:
        `(out [P, M, C' + 1], lse [P, M])`, fp32: the weighted means of the values' levels times their scales and, last,
        those of the scales alone. A pair without rows gives 0 and -inf. Raises InputError for an implementation that is
        not to be had here."""
    if impl == "auto":
        impl = "triton" if query.is_cuda else "cpu" if native.available() else "reference"
    if impl not in IMPLEMENTATIONS:
        raise InputError(
            f"packed_attention has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    if query.dtype != torch.float32:
        raise InputError(f"packed_attention takes queries in fp32, not {query.dtype}; call .float() on them.")
    for name, side in (("keys", keys), ("values", values)):
        if not side.words.is_contiguous() or not side.scales.is_contiguous():
            raise InputError(f"packed_attention needs contiguous codes, but those of the {name} are not.")
    module = {"reference": "reference", "cpu": "numba", "triton": "triton"}[impl]
    return import_module(f"{__name__}.{module}").packed_attention(query, constant, keys, values, rows)


__all__ = ["Packed", "PackedRows", "packed_attention"]
