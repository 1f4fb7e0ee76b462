"""Joining ragged entries head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.types import Entries


def join_entries(first: Entries, second: Entries) -> Entries:
    """Return entries that hold, for each (b, h), the rows of `first` and then those of `second`."""
    n_first, n_second = first.offsets.diff(), second.offsets.diff()
    offsets = first.offsets + second.offsets
    pairs = torch.arange(len(n_first), device=offsets.device)
    to_first = torch.arange(len(first.keys), device=offsets.device) + second.offsets[:-1].repeat_interleave(n_first)
    to_second = torch.arange(len(second.keys), device=offsets.device)
    to_second = to_second + first.offsets[1:][pairs.repeat_interleave(n_second)]

    def both(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(len(a) + len(b), *a.shape[1:])
        out[to_first], out[to_second] = a, b
        return out

    log_multiplicity = positions = None
    if first.log_multiplicity is not None or second.log_multiplicity is not None:
        log_multiplicity = both(*(
            e.keys.new_zeros(len(e.keys), dtype=torch.float32) if e.log_multiplicity is None else e.log_multiplicity
            for e in (first, second)
        ))
    if first.positions is not None and second.positions is not None:
        positions = both(first.positions, second.positions)
    keys, values = both(first.keys, second.keys), both(first.values, second.values)
    return Entries(offsets, keys, values, log_multiplicity, positions)
