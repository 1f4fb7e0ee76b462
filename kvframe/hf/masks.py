"""Masks of later calls, held against what became of the tokens that they hide: exact ones follow the mask, compressed
ones cannot, and padding stays hidden whether the mask says so or not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvframe.errors import InputError

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache

MaskFunction = Callable[..., Tensor | None]


# Transformers asks a cache for the sizes of a mask, and then, without naming it, the mask function for the mask.
_asking = threading.local()


def asked(cache: CompressedCache, sizes: tuple[int, int]) -> tuple[int, int]:
    """Note that a mask of these sizes (columns, the first of them) is made next, for this cache."""
    _asking.of = weakref.ref(cache), sizes
    return sizes


def _who_asks(sizes: tuple[int, int]) -> CompressedCache | None:
    cache, noted = getattr(_asking, "of", None) or (None, None)
    _asking.of = None
    return cache() if cache is not None and noted == sizes else None


def following(mask_function: MaskFunction) -> MaskFunction:
    """A mask function of transformers, as it was for all but masks that are made for a kvframe cache: those it makes
    from what the cache knows of its past as well. Only here can the columns before the mask's first one be seen."""

    @wraps(mask_function)
    def follow(*args: Any, **kwargs: Any) -> Tensor | None:
        cache = _who_asks((kwargs.get("kv_length", 0), kwargs.get("kv_offset", 0)))
        if cache is not None:
            known = whole_mask(cache, kwargs.get("attention_mask"), kwargs["batch_size"], kwargs["q_length"])
            kwargs["attention_mask"] = None if known is None else known.to(kwargs.get("device", known.device))
        return mask_function(*args, **kwargs)

    return follow


def whole_mask(cache: CompressedCache, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """The mask bool `[B, K]` for a call of `length` new columns that comes with `mask` bool `[B, K]`, padding of the
    past hidden; None if every column is a token that it shows. Notes which exact tokens are hidden.

    Raises InputError for a mask of too few columns, and what `follow_mask` does."""
    columns, valid, first = cache.columns, cache.valid, cache.compressed_layers[0]
    columns.hidden = None
    if valid is None or len(valid) != batch or valid.shape[1] != first.recent.length:
        return mask  # there is nothing to know yet, or the step will be refused
    gaps = columns.gaps or cache.recent_validity_bias is not None
    if mask is None:
        return nn.functional.pad(columns.known(valid, first.seen), (0, length), value=True) if gaps else None
    if mask.shape[1] < first.seen + length:
        raise InputError(
            f"attention_mask has {mask.shape[1]} columns, but the cache has seen {first.seen} and {length} came; give "
            "one for each."
        )
    past = mask[:, : first.seen]
    if not gaps and bool(past.all()):
        return mask
    past = past.to(valid.device) & ~columns.padded(first.seen, valid)
    if not torch.equal(past, columns.known(valid, first.seen)):
        follow_mask(cache, past[:, None, None], first.seen)
        if cache.valid is not None and bool((hidden := cache.valid & ~past[:, first.seen - valid.shape[1] :]).any()):
            columns.hidden = hidden
    return torch.cat([past.to(mask.device), mask[:, first.seen :]], 1)


def follow_mask(cache: CompressedCache, shown: Tensor, seen: int, real: Tensor | None = None) -> None:
    """Hold a mask against the cache: `shown` bool `[B, h, Q, n]` are the last `n` of the `seen` columns of the past,
    `real` bool `[B, Q]` the queries that are no padding. Exact tokens that were hidden so far and are shown now count
    as tokens from now on.

    Raises InputError if a compressed token is hidden from a query, or one that is gone is shown."""
    columns, valid = cache.columns, cache.valid
    count = shown.shape[3]
    exact_only = seen - count >= max(columns.edge, columns.end) and cache.recent_validity_bias is None
    if valid is None or exact_only:
        return
    shown = shown.to(valid.device)
    asks = shown.new_ones(1, 1, 1, 1) if real is None else real[:, None, :, None]
    some, every = (shown & asks).flatten(1, 2).any(1), (shown | ~asks).flatten(1, 2).all(1)
    held, known, padded = (
        whole[:, seen - count :]
        for whole in (columns.held(seen, valid), columns.known(valid, seen), columns.padded(seen, valid))
    )
    _refuse(
        held & ~every,
        seen - count,
        "hides",
        "but what is compressed is attended by every later token; hide tokens before they are compressed, or go on "
        "with a fork made before",
    )
    back = some & ~known & ~padded
    exact = min(count, valid.shape[1])
    _refuse(
        back[:, : count - exact],
        seen - count,
        "shows",
        "but what was hidden when the rest was compressed is gone; show tokens until they are compressed, or go on "
        "with a fork made before",
    )
    back = nn.functional.pad(back[:, count - exact :], (valid.shape[1] - exact, 0))
    if bool(back.any()):
        cache.valid = valid | back
        cache.ledger.see(back)
        cache.note_validity()


def _refuse(wrong: Tensor, first: int, does: str, why: str) -> None:
    if bool(wrong.any()):
        row, column = (int(n) for n in wrong.nonzero()[0])
        count = int(wrong[row].sum())
        tokens = "1 token" if count == 1 else f"{count} tokens"
        raise InputError(f"attention_mask {does} {tokens} of row {row}, from column {first + column} on, {why}.")


def watch_mask(cache: CompressedCache, seen: int, length: int, mask: Tensor | None) -> None:
    """Once a step: note which of the `length` new columns are tokens, given that `seen` came before them, and hold the
    mask `[B, h, Q, W]` of the step, which ends with the new columns, against the cache.

    Raises InputError as `follow_mask` does, for a mask of more columns than there are, and for one that adds something
    to the logits of compressed tokens."""
    if cache.positions is None:
        return
    # A graph that is compiled cannot look into a mask; exact tokens follow that of the step all the same.
    if length == 1 and cache.recent_validity_bias is None and torch.compiler.is_compiling():
        mask = None
    new = new_validity(mask, len(cache.positions), length, cache.positions.device)
    if mask is not None and cache.valid is not None:
        past = mask[..., :-length]
        if past.shape[3] > seen:
            raise InputError(
                f"attention_mask has {mask.shape[3]} columns, but the cache has seen {seen} and {length} came; give "
                "one for each."
            )
        follow_mask(cache, visible(past), seen, new)
        if past.is_floating_point() and seen - past.shape[3] < cache.columns.end:
            held = cache.columns.held(seen, cache.valid)[:, None, None, seen - past.shape[3] :]
            if bool((held.to(past.device) & visible(past) & (past != 0)).any()):
                raise InputError(
                    "attention_mask adds a bias to the logits of compressed tokens, which have no logit of their own; "
                    "give a mask that shows tokens or hides them."
                )
    cache.columns.see(new, cache.ledger.tokens)
    cache.ledger.see(new)
    cache.valid = new if cache.valid is None else torch.cat([cache.valid, new], 1)
    if length > 1 or mask is not None or cache.recent_validity_bias is not None:
        cache.note_validity()


def new_validity(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Which of the last `length` columns are tokens, bool `[B, length]`: those that some query of the call may see.
    The last query need not: it may belong to another document, or another branch of drafts."""
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    seen = visible(mask[..., -length:]).flatten(1, 2).any(1)
    return seen.expand(batch, length).to(device)


def visible(mask: Tensor) -> Tensor:
    """A mask of either kind as bool, True = visible."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def validity_bias(valid: Tensor | None) -> tuple[Tensor | None, int]:
    """The bias fp32 `[B, 1, 1, R]` that hides columns that hold no exact token (`valid` bool `[B, R]`), None if there
    are none, and how many of them stand at the end of a row at most."""
    if valid is None or bool(valid.all()):
        return None, 0
    bias = torch.zeros(valid.shape, device=valid.device).masked_fill(~valid, -torch.inf)
    return bias[:, None, None, :], int(valid.flip(1).cumsum(1).eq(0).sum(1).max())
