"""Choosing the encoder's width at a cache's first compression, under a budget of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe.budget import Regions
from kvframe.contracts import blaming
from kvframe.split import attention_error, differences

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def choose_width(cache: CompressedCache, regions: Regions, itemsize: int, prompt: bool) -> None:
    """Let the cache go on with the encoder's width with which attention errs least. Costs one compression a width.
    Where none of them buys anything, the choice is left for later. For the arguments see `Ledger.budget`."""
    observation, errors = cache.observe(regions, cache.pipeline.needs), []
    variants, shares = cache.pipeline.variants, []
    blocks = [variant.paid_block if prompt else 1 for variant in variants]
    for variant, block in zip(variants, blocks, strict=True):
        bits = variant.entry_bits(cache.info, itemsize)
        shares.append(cache.ledger.budget(variant.spec.budget, regions, cache.info, itemsize, bits, prompt, block))
    if not any(bool(share.body.any()) for share in shares):
        return
    for variant, bound, share, block in zip(variants, cache.bound, shares, blocks, strict=True):
        made = variant.run(observation, share.body, regions.sinks, None, bound, block)
        with blaming(cache.kernel, variant.spec.encoder):
            errors.append(attention_error(observation, regions, made.parts, cache.kernel))
    best = min(range(len(errors)), key=errors.__getitem__)
    said = differences([variant.spec.encoder for variant in variants])
    cache.ledger.note(f"of {len(variants)} widths of the encoder attention errs least with {said[best]}")
    cache.pipeline, cache.bound = variants[best], cache.bound[best]
