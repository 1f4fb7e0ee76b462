"""What a cache keeps exactly at a compression: in prompts, in chunks of one, and while an answer is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.budget import Lengths, Regions, fitted_recent, row_lengths, split_regions, too_short

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def regions_now(
    cache: CompressedCache, valid: Tensor, suffix_length: Lengths, prompt: bool, reading: bool, itemsize: int
) -> Regions:
    """Share out the exact tokens `valid [B, R]`. `prompt` False = a block of an answer, `reading` = a chunk of a prompt
    of which more will come, `itemsize` = bytes of an exact value. Rows that cannot be compressed yet wait, whole.

    Raises InputError as `split_regions` does."""
    spec, begins = cache.pipeline.spec, cache.ledger.begins(valid)
    whole = prompt and bool(begins.all())
    suffix = suffix_length if whole else _clamped(suffix_length, valid)
    prefix = _clamped(cache.prefix_length, valid) if reading else cache.prefix_length
    regions = split_regions(valid, spec.protect, prefix, suffix, None, begins)
    if reading:
        bits = cache.pipeline.entry_bits(cache.info, itemsize)
        return regions.postponed(begins & too_short(spec.budget, regions, cache.info, itemsize, bits))
    if not prompt and spec.decode.flush is not None:
        return regions.postponed(~full_rows(cache, valid, spec.decode.flush))
    recent = fitted_recent(spec.budget, spec.protect, regions, cache.info, itemsize) if prompt else None
    if recent is not None:
        recent = torch.where(begins, recent, spec.protect.recent)
        if int(recent.min()) < spec.protect.recent:
            regions = split_regions(valid, spec.protect, prefix, suffix, recent, begins)
            cache.ledger.note(f"the budget is small: the recent window was shortened to {int(recent.min())} tokens")
    # A row that is no longer than what is protected stays as it is, as it would alone.
    return regions.postponed(begins & ~regions.body.any(1))


def full_rows(cache: CompressedCache, valid: Tensor, flush: int) -> Tensor:
    """Rows whose exact tokens are a whole block more than is protected at the end, bool `[B]`. Each row counts its own,
    so that it does not matter what else is in the batch."""
    if valid.shape[1] < cache.pipeline.spec.protect.recent + flush:  # saves a transfer from the device at most steps
        return valid.new_zeros(len(valid))
    return room_in_block(cache, valid, flush) <= 0


def room_in_block(cache: CompressedCache, valid: Tensor, flush: int) -> Tensor:
    """How many tokens go in before `full_rows` holds, int64 `[B]`."""
    suffix = row_lengths(cache.suffix_length, len(valid), "suffix_length").to(valid.device)
    return cache.pipeline.spec.protect.recent + suffix + flush - valid.sum(1)


def _clamped(length: Lengths, valid: Tensor) -> Tensor:
    """At most what is there: later blocks may be shorter than the suffix of a prompt."""
    count = valid.sum(1).cpu()
    return torch.minimum(row_lengths(length, len(count), "length"), count)
