"""What a cache keeps exactly at a compression: in prompts, in chunks of one, and while an answer is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.budget import Lengths, Regions, fitted_regions, row_lengths, split_regions, too_short

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def regions_now(
    cache: CompressedCache, valid: Tensor, suffix_length: Lengths, prompt: bool, reading: int | None, itemsize: int
) -> Regions:
    """Share out the exact tokens `valid [B, R]`. `prompt` False = a block of an answer, `reading` = a chunk of a prompt
    of which more will come, in rows with so many tokens beside the recent window, `itemsize` = bytes of an exact value.
    Rows that cannot be compressed yet wait, whole.

    Raises InputError as `split_regions` does."""
    spec, begins = cache.pipeline.spec, cache.ledger.begins(valid)
    whole = prompt and bool(begins.all())
    suffix = suffix_length if whole else _clamped(suffix_length, valid)
    prefix = cache.prefix_length if reading is None else _clamped(cache.prefix_length, valid)
    if prompt and reading is None:
        regions, recent = fitted_regions(valid, spec, cache.info, itemsize, prefix, suffix, begins)
        if recent is not None:
            cache.ledger.note(f"the budget is small: the recent window was shortened to {int(recent.min())} tokens")
        # A row that is no longer than what is protected stays as it is, as it would alone.
        return regions.postponed(begins & ~regions.body.any(1))
    regions = split_regions(valid, spec.protect, prefix, suffix, None, begins)
    if reading is not None:
        short = begins & too_short(spec.budget, regions, cache.info, itemsize)
        return regions.postponed(short | (valid.sum(1) < spec.protect.recent + reading))
    waits = begins & ~regions.body.any(1) if spec.decode.flush is None else ~full_rows(cache, valid, spec.decode.flush)
    return regions.postponed(waits)


def uncompressed(cache: CompressedCache) -> tuple[Tensor, Tensor]:
    """Tokens of a prompt that was not compressed yet, int64 `[B]` each: those that the books will count, and those of
    them that wait to be compressed and not to be kept exactly."""
    if (valid := cache.valid) is None:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    begins, prefix = cache.ledger.begins(valid), _clamped(cache.prefix_length, valid)
    # A report may be asked for before the question, or more of the prefix, has come.
    suffix = torch.minimum(_clamped(cache.suffix_length, valid), valid.sum(1).cpu() - prefix)
    regions = split_regions(valid, cache.pipeline.spec.protect, prefix, suffix, None, begins)
    waiting = regions.body.sum(1) * cache.pending
    return torch.where(begins & (waiting > 0), regions.context, waiting), waiting


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
