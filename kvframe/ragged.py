"""Joining ragged rows head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.types import Encoded, Entries, Part


def append_part(parts: tuple[Part, ...], new: Part) -> tuple[Part, ...]:
    """Return `parts` with `new` among them, joined to the last one like it if their encoder can do it: fewer parts mean
    fewer kernel calls a step. What has positions does not join what has none."""
    for index in reversed(range(len(parts))):
        old = parts[index]
        alike = old.encoder == new.encoder and old.state is new.state
        if alike and (old.encoded.positions is None) == (new.encoded.positions is None):
            joined = new.encoder.join(old.encoded, new.encoded, new.state)
            if joined is not None:
                return (*parts[:index], Part(joined, new.encoder, new.state), *parts[index + 1 :])
    return (*parts, new)


def pick_rows(entries: Entries, kept: Tensor) -> Entries:
    """The entries where `kept` (bool `[N]`) is True."""
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    optional = {name: getattr(entries, name) for name in ("log_multiplicity", "positions")}
    picked = {name: None if tensor is None else tensor[kept] for name, tensor in optional.items()}
    return Entries(before[entries.offsets], entries.keys[kept], entries.values[kept], **picked)


def join_rows(first: Encoded, second: Encoded) -> Encoded:
    """Return the codes that hold, for each (b, h), the rows of `first` and then those of `second`.

    Both must be of one format whose codes are all `[N, …]`, one row an entry."""
    n_first, n_second = first.offsets.diff(), second.offsets.diff()
    rows_first, rows_second = int(first.offsets[-1]), int(second.offsets[-1])
    device = first.offsets.device
    # A row moves right by the other part's rows of the heads before it (for `second`: and of its own head).
    to_first = torch.arange(rows_first, device=device) + second.offsets[:-1].repeat_interleave(n_first)
    to_second = torch.arange(rows_second, device=device) + first.offsets[1:].repeat_interleave(n_second)

    def join(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(rows_first + rows_second, *a.shape[1:])
        out[to_first], out[to_second] = a, b
        return out

    def join_optional(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None and b is None:
            return None
        known = a if a is not None else b
        zeros = [known.new_zeros(n) for n in (rows_first, rows_second)]  # type: ignore[union-attr]
        return join(zeros[0] if a is None else a, zeros[1] if b is None else b)

    return Encoded(
        offsets=first.offsets + second.offsets,
        codes={name: join(codes, second.codes[name]) for name, codes in first.codes.items()},
        format=first.format,
        dtype=first.dtype,
        log_multiplicity=join_optional(first.log_multiplicity, second.log_multiplicity),
        positions=join_optional(first.positions, second.positions),
    )
