"""What a cache says of its budget: rows too short for it, more than there is to buy, what it does not pay for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvframe.budget import Regions, allowed_bytes, buys_more, too_short
from kvframe.plain import held_tensors
from kvframe.report import size_text
from kvframe.types import storage_bytes

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache

TOO_SHORT, NOTHING_DONE = "too short for the budget", "nothing was compressed"
NAMED = 3  # rows whose lengths are given
# What an encoder learned is worth a word above this share of the budget; declared bits are off by about as much.
NEGLIGIBLE = 0.01


def on_compression(cache: CompressedCache, regions: Regions, prompt: bool, itemsize: int, fresh: bool) -> None:
    """Note what is to be said of a compression before it is booked: of a whole prompt, or (`prompt` False) of a block.
    `regions` are what was shared out, `itemsize` the bytes of an exact value; `fresh`: what the encoder learned, it
    learned now."""
    budget, info, ledger = cache.pipeline.spec.budget, cache.info, cache.ledger
    begins = ledger.begins(regions.body)
    if not ledger.compressions:
        ledger.remark("short", "")
    # Blocks pay for what is protected only where nothing else could; see Ledger.budget.
    new = begins if prompt else begins & regions.body.any(1) & (budget.ratio is None)
    short = new & (regions.context > 0) & too_short(budget, regions, info, itemsize)
    if bool(short.any()):
        rows, kept = _rows(short, regions.context), int(regions.charged[short].max())
        ledger.remark("short", f"{rows} {TOO_SHORT}: only what is protected is kept, {kept} tokens at most")
    bits, block = cache.pipeline.entry_bits(info, itemsize), cache.pipeline.paid_block if prompt and fresh else 1
    rich = new & buys_more(budget, regions, info, itemsize, bits, block)
    if bool(rich.any()):
        rows = _rows(rich, regions.context)
        ledger.note(f"{rows} smaller than the budget: all of it is kept, as finely as the encoder codes")
    learned = storage_bytes(list(held_tensors(cache.states))) if fresh and cache.bound is None else 0
    if learned and not budget.counts_entries:
        allowed = allowed_bytes(budget, regions, info, itemsize)
        held = cache.measured()
        text = (
            f"the budget of {size_text(int(allowed))} does not pay for what the encoder learned from this prompt, "
            f"{size_text(learned)}: {size_text(held.bytes)} are held, and {size_text(held.full_bytes)} would be the "
            "full cache; what is learned from a text (kvframe calibrate) is shared by all caches"
        )
        ledger.remark("learned", text if learned > NEGLIGIBLE * allowed else "")


def on_nothing(cache: CompressedCache, regions: Regions, itemsize: int) -> None:
    """Note that a prompt stays as it is, since it is not longer than what is protected."""
    seen = ", ".join(str(int(n)) for n in (regions.sinks | regions.tail).sum(1))
    cache.ledger.remark(
        "short",
        f"{NOTHING_DONE}: the prompt ({seen} tokens) is not longer than what is protected",
        loud=bool(too_short(cache.pipeline.spec.budget, regions, cache.info, itemsize).any()),
    )


def on_waiting(tokens: Tensor) -> tuple[str, ...]:
    """Notes on `tokens` int64 `[B]` that wait to be compressed: one, or none if nothing waits."""
    many = ", ".join(str(int(n)) for n in tokens)
    said = f"{many} tokens wait uncompressed until the answer begins, or cache.compress() is called"
    return (said,) if bool(tokens.any()) else ()


def _rows(which: Tensor, lengths: Tensor) -> str:
    """Some rows (bool `[B]`) and their `lengths` in words, with the verb."""
    count = int(which.sum())
    some = ", ".join(str(int(n)) for n in lengths[which][:NAMED]) + (", …" if count > NAMED else "")
    if len(which) == 1:
        return f"the prompt ({some} tokens) is"
    return f"{count} of {len(which)} rows ({some} tokens) {'is' if count == 1 else 'are'}"
