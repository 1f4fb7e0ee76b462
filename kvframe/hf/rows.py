"""The batch rows of a cache: how many it can take, picking some of them, and taking its last columns off again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvframe.arguments import as_tensor, whole_number
from kvframe.budget import row_lengths
from kvframe.contracts import blaming
from kvframe.errors import InputError
from kvframe.hf.recurrent import own_layers

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def repeat(cache: CompressedCache, repeats: int) -> None:
    """Let each batch row come `repeats` times, one behind the other."""
    if (times := whole_number("repeats", repeats)) < 1:
        raise InputError(f"repeats must be at least 1, but is {times}.")
    if cache.valid is not None:
        select(cache, torch.arange(len(cache.valid)).repeat_interleave(times))


def select(cache: CompressedCache, indices: Sequence[int] | Tensor) -> None:
    """Keep these batch rows of all that the cache holds. Everything that can fail is done before anything is
    changed."""
    cache.settle()
    if cache.valid is None or cache.positions is None:
        return
    batch = len(cache.valid)
    indices = as_tensor("indices", indices, f"numbers of rows, or a mask of {batch}")
    whole = indices.dtype == torch.bool and indices.numel() == batch
    if not whole and (indices.dtype == torch.bool or indices.is_floating_point() or indices.is_complex()):
        raise InputError(
            f"Rows are picked by number, or by a mask of {batch}, but {indices.numel()} values of {indices.dtype} came."
        )
    rows = indices.nonzero().flatten() if whole else indices.flatten().long()
    wanted = rows.tolist()
    if not wanted or min(wanted) < 0 or max(wanted) >= batch:
        raise InputError(f"The rows of a cache of {batch} are 0 to {batch - 1}, but {wanted} are asked for.")
    if wanted == list(range(batch)):
        return
    with blaming(cache.pipeline.spec.encoder):
        parts = [layer.picked(wanted) for layer in cache.compressed_layers]
    for layer, picked in zip(cache.compressed_layers, parts, strict=True):
        layer.select(rows, picked)
    for own in own_layers(cache.layers):
        own.reorder_cache(rows)
    cache.watch.select(rows)
    cache.ledger.select(rows)
    cache.columns.select(rows)
    cache.valid, cache.positions = (t[rows.to(t.device)] for t in (cache.valid, cache.positions))
    cache.prefix_length = row_lengths(cache.prefix_length, batch, "prefix_length")[rows.cpu()]
    cache.suffix_length = row_lengths(cache.suffix_length, batch, "suffix_length")[rows.cpu()]
    cache.note_validity()


def crop(cache: CompressedCache, columns: int) -> None:
    """Forget the last columns, which must be exact."""
    if columns < 0:
        raise InputError(f"crop takes the number of tokens to remove as a negative one, but {-columns} came.")
    cache.settle()
    if cache.announced is not None:
        columns = cache.announced.rewind(cache, columns)
    seen, exact = cache.compressed_layers[0].seen, cache.exact_columns
    if columns > (exact := min(exact, seen - cache.columns.end)):
        raise InputError(
            f"crop can take off the last {exact} tokens, which are held exactly, but {columns} are asked for; what is "
            "compressed stays so. Raise protect.recent, or crop a fork made before the compression."
        )
    for own in own_layers(cache.layers):
        if columns:
            _check_croppable(own)
    for layer in cache.compressed_layers:
        layer.drop_last(columns)
    for own in own_layers(cache.layers):
        if columns or not isinstance(own, LinearAttentionCacheLayerMixin) or own.record_past:
            own.crop(-columns)
    cache.drafting = True
    if columns and cache.valid is not None and cache.positions is not None:
        cache.watch.drop_last(columns)
        cache.columns.drop_last(seen - columns)
        cache.ledger.forget(cache.valid[:, -columns:])
        cache.valid, cache.positions = cache.valid[:, :-columns], cache.positions[:, :-columns]
        cache.note_validity()


def _check_croppable(own: Any) -> None:
    """Raise InputError if one of transformers' own layers cannot take tokens back."""
    recurs, recorded = isinstance(own, LinearAttentionCacheLayerMixin), getattr(own, "record_past", True)
    if recurs and not own.is_croppable:
        raise InputError(
            "The recurrent layers of this model cannot take tokens back: their state is of all tokens together; go on "
            "with a fork made before these tokens."
        )
    # Such a layer lets go of what its window, or its convolution, has passed.
    window = getattr(own, "sliding_window", 0)
    if not recorded and (recurs or (window and own.get_seq_length() >= window)):
        kind = (
            "Convolutions cannot take tokens back"
            if recurs
            else ("Sliding-window layers cannot take tokens back once their window is full")
        )
        raise InputError(
            f"{kind}, unless they keep more: call cache.activate_past_recording() before the tokens that may be taken "
            "off again."
        )
