"""Codes of the rows of each (b, h) in blocks of 32, packed as bit planes: what the encoders here have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvframe.ops import bitpack
from kvframe.types import Encoded, Entries


def runs_of(bounds: tuple[int, ...]) -> bitpack.Runs:
    """One run for each (b, h)."""
    return bitpack.Runs(tuple(end - begin for begin, end in pairwise(bounds)))


def pack_rows(codes: Tensor, bits: int, runs: bitpack.Runs) -> Tensor:
    """Words int32 `[M, bits, D]` of unsigned codes `[N, D]`."""
    return bitpack.pack(runs.pad(codes.T.contiguous()), bits)


def unpack_rows(words: Tensor, bits: int, runs: bitpack.Runs) -> Tensor:
    """Codes `[N, D]`, uint8."""
    return runs.trim(bitpack.unpack(words, bits)).T.contiguous()


def join_rows(
    first: Encoded, second: Encoded, planes: tuple[str, ...], done: Mapping[str, Tensor] | None = None
) -> Encoded:
    """The rows of `first`, then those of `second`, in each (b, h). The codes in `planes` are words `[M, bits, D]`,
    whose bits are shifted into place; those in `done` are joined already; all others have one row an entry."""
    runs, more = runs_of(first.bounds), runs_of(second.bounds)

    def join(name: str) -> Tensor:
        a, b = first.codes[name], second.codes[name]
        if done is not None and name in done:
            return done[name]
        if name not in planes:
            return runs.join_rows(a, more, b)
        return runs.join(a.flatten(1), more, b.flatten(1)).view(-1, *a.shape[1:])

    def optional(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None and b is None:
            return None
        like = a if a is not None else b
        mine, theirs = (
            torch.zeros(r.rows, dtype=like.dtype, device=like.device) if t is None else t  # type: ignore[union-attr]
            for t, r in ((a, runs), (b, more))
        )
        return runs.join_rows(mine, more, theirs)

    return Encoded(
        first.offsets + second.offsets,
        {name: join(name) for name in first.codes},
        first.format,
        first.dtype,
        optional(first.log_multiplicity, second.log_multiplicity),
        optional(first.positions, second.positions),
    )


def select_rows(
    codes: Encoded, rows: Sequence[int], batch: int, planes: tuple[str, ...], done: Mapping[str, Tensor] | None = None
) -> Encoded:
    """The codes of these batch rows alone. `planes` and `done` as for `join_rows`."""
    runs = runs_of(codes.bounds)
    picked = pairs_of(codes, rows, batch)
    found = {
        name: done[name]
        if done is not None and name in done
        else (runs.select if name in planes else runs.select_rows)(tensor, picked)
        for name, tensor in codes.codes.items()
    }
    return codes.pick(rows, batch, found)


def pairs_of(codes: Encoded, rows: Sequence[int], batch: int) -> list[int]:
    """The (b, h) of these batch rows."""
    heads = (len(codes.bounds) - 1) // batch
    return [row * heads + head for row in rows for head in range(heads)]


def encoded(entries: Entries, codes: Mapping[str, Tensor], layout: str) -> Encoded:
    """The codes with what belongs to the entries."""
    return Encoded(entries.offsets, codes, layout, entries.keys.dtype, entries.log_multiplicity, entries.positions)


def decoded(codes: Encoded, keys: Tensor, values: Tensor) -> Entries:
    """fp32 rows as entries again; what rounding lifts beyond float16 stays at its largest number."""
    if codes.dtype == torch.float16:
        keys, values = (x.clamp(-torch.finfo(codes.dtype).max, torch.finfo(codes.dtype).max) for x in (keys, values))
    return Entries(codes.offsets, keys.to(codes.dtype), values.to(codes.dtype), codes.log_multiplicity, codes.positions)
