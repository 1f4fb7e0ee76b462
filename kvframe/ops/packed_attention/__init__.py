"""Attention in code space: queries meet packed codes, and weights gather them, without a key or a value rebuilt.

An encoder whose vectors are `s A^T l(u)`, a linear map of the levels that codes `u` stand for, times a scale `s` a row,
brings `A q` as the query and maps what comes out: `q.k = s (A q).l(u)`, and `sum w v = A^T sum (w s) l(u)`."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import native
from kvframe.ops.packed_attention.layout import Packed, PackedRows, Rebuild

IMPLEMENTATIONS = ("reference", "cpu", "triton")


def packed_attention(
    query: Tensor,
    constant: Tensor | None,
    keys: Packed,
    values: Packed,
    rows: PackedRows,
    impl: str = "auto",
    rebuild: Rebuild | None = None,
    softcap: float | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the rows of `P` pairs (of a batch row and a group of heads) with queries in code space.

    Args:
        query: fp32 `[P, M, C]`, times the softmax's scale; zero beyond a group's own channels. With `rebuild` the
            queries themselves, `[P, M, D]`; `M / n` for each head of a group, head after head.
        constant: fp32 `[P, M]`, added to the product before it is multiplied by the key's scale; None = 0.
        keys, values: the codes of all groups.
        rows: how many rows each pair has, and their log multiplicities.
        impl: "reference", "cpu" (numba), "triton" (without `rebuild`), or "auto": what is there for the device.
        rebuild: rebuild and rotate the keys, block by block, as they are attended.
        softcap: caps logits at `softcap * tanh(logit / softcap)`, before log multiplicities; None = there is no cap.
        shift: fp32 `[P, M]`, added to every logit of a query before the cap: its product with what all keys share;
            None = 0.

    Returns:
        `(out [P, M, C' + 1], lse [P, M])`, fp32: the weighted means of the values' levels times their scales and, last,
        those of the scales alone. A pair without rows gives 0 and -inf. Raises InputError for an implementation that is
        not to be had here."""
    if impl == "auto":
        impl = "cpu" if query.device.type == "cpu" and native.available() else "reference"
        impl = "triton" if query.is_cuda and rebuild is None else impl
    if impl not in IMPLEMENTATIONS:
        raise InputError(
            f"packed_attention has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    if query.dtype != torch.float32:
        raise InputError(f"packed_attention takes queries in fp32, not {query.dtype}; call .float() on them.")
    for name, side in (("keys", keys), ("values", values)):
        if not side.words.is_contiguous() or not side.scales.is_contiguous():
            raise InputError(f"packed_attention needs contiguous codes, but those of the {name} are not.")
    wide = query.shape[-1] if rebuild is None else keys.channels
    blocks = [sum(rows.blocks[group :: rows.groups]) for group in range(rows.groups)]
    for name, side in (("keys", keys), ("values", values)):
        words = sum(m * w for m, w in zip(blocks, side.words_a_block, strict=True))
        if side.words.numel() != words or len(side.scales) != sum(rows.lengths) or keys.channels != wide:
            raise InputError(
                f"packed_attention was given {wide} channels of queries for {keys.channels}, and {side.words.numel()} "
                f"words and {len(side.scales)} scales of {name} for {words} and {sum(rows.lengths)}."
            )
    if rebuild is not None and impl == "triton":
        raise InputError("packed_attention cannot rebuild keys with 'triton'; use impl='auto', or codes after RoPE.")
    if constant is None:
        constant = query.new_zeros(query.shape[:2])
    module = {"reference": "reference", "cpu": "numba", "triton": "triton"}[impl]
    attend = import_module(f"{__name__}.{module}").packed_attention
    more = () if rebuild is None else (rebuild,)
    if softcap is not None:
        shift = query.new_zeros(query.shape[:2]) if shift is None else shift
        return attend(query, constant, keys, values, rows, softcap, shift, *more)
    out, lse = attend(query, constant, keys, values, rows, None, None, *more)
    return out, lse if shift is None else lse + shift


__all__ = ["Packed", "PackedRows", "Rebuild", "packed_attention"]
