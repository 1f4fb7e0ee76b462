"""How many entries and bytes a spec comes to, without running it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvframe.budget import entry_budget, fitted_regions, too_short
from kvframe.errors import InputError
from kvframe.pipeline import Pipeline
from kvframe.types import ModelInfo

# More than any model reads; the arithmetic holds a few bytes for each.
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Region:
    """A region of the context: its tokens, the entries kept of them per KV head (mean over layers and heads), and their
    bytes over all layers and heads."""

    name: str
    tokens: int
    entries: float
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """Entries and bytes of one sequence, by region. An allocator may leave part of the body's budget unspent, so the
    body's are an upper bound; offsets and the slack of growing buffers come on top. `graded`: the body's entries are
    counted in the dearest of several grades, so that there may be more of them. `short`: the budget does not cover what
    is protected, which is kept all the same, and nothing else."""

    regions: tuple[Region, ...]
    full_bytes: int
    graded: bool = False
    short: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.bytes for region in self.regions)


def estimate(pipeline: Pipeline, model: ModelInfo, itemsize: int, tokens: int) -> Estimate:
    """What `pipeline` makes of `tokens` tokens; `itemsize` = bytes of one exact value. The encoder's size is
    the one that it declares. Raises BudgetError if a strict budget does not cover what the spec protects, InputError
    for no token, or too many."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise InputError(f"An estimate is made for 1 to {MOST_TOKENS} tokens, but got {tokens}.")
    spec, units = pipeline.spec, model.layers * model.kv_heads
    exact = 2 * model.head_dim * itemsize  # bytes of a key and a value
    valid = torch.ones(1, tokens, dtype=torch.bool)
    suffix = min(spec.protect.suffix, tokens)
    regions, _ = fitted_regions(valid, spec, model, itemsize, suffix=suffix)
    bits = pipeline.entry_bits(model, itemsize)
    body, _ = entry_budget(spec.budget, regions, model, itemsize, bits)
    body_tokens = int(regions.body.sum())
    kept = units * body_tokens if spec.allocator.keeps_all else int(body)

    def kept_exactly(name: str, count: int) -> Region:
        return Region(name, count, count, count * units * exact)

    return Estimate(
        (
            kept_exactly("sinks", int(regions.sinks.sum())),
            Region("body", body_tokens, kept / units, int(kept * bits / 8)),
            kept_exactly("recent window", int(regions.tail.sum()) - suffix),
            kept_exactly("suffix (the question)", suffix),
        ),
        tokens * units * exact,
        graded=len(pipeline.encoders) > 1,
        short=bool(((regions.context > 0) & too_short(spec.budget, regions, model, itemsize)).any()),
    )
