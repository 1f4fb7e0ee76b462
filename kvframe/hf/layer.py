"""One compressed layer of the cache."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvframe.errors import InputError, ModelError
from kvframe.hf.attention import LAYER, as_bias
from kvframe.hf.buffer import Recent, Tail
from kvframe.hf.masks import watch_mask
from kvframe.hf.precision import common_dtype
from kvframe.stages import Kernel
from kvframe.types import LayerObservation, Needs, Part

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


INFERENCE = "A kvframe cache is for inference; call the model under torch.no_grad()."


class CompressedLayer(CacheLayerMixin):
    """Holds compressed parts and the exact recent tokens; `update` hands itself to the attention function."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: CompressedCache, needs: Needs) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # no cycle: a cache let go frees its memory at once
        self.parts: tuple[Part, ...] = ()
        self.recent = Recent()
        self.seen = 0  # columns seen, padding included: the logical length
        self.order = cache.info.channel_order
        self.queries = Tail(needs.queries, dim=2)
        self.outputs = Tail(needs.head_outputs, dim=2)

    @property
    def cache(self) -> CompressedCache:
        """The cache that this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the cache of this layer is gone")
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated ahead."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, H, Q, D]`; return the exact recent ones, views `[B, H, R, D]`, both in the dtype
        that the cache began with."""
        passed_on = kwargs.get("kwargs")
        if passed_on is None:
            raise ModelError(
                "The model does not pass its attention arguments to cache.update (transformers >= 5.24 models do), so "
                "kvframe's attention would not be reached; use a model class of that version."
            )
        if key_states.requires_grad:
            raise InputError(INFERENCE)
        passed_on[LAYER] = self
        dtype = self.recent.dtype or common_dtype(key_states, value_states)
        self.recent.append(key_states.to(dtype), value_states.to(dtype))
        self.seen += key_states.shape[2]
        self.is_initialized = True
        return self.recent.keys, self.recent.values

    def kernels(self) -> Iterator[tuple[Kernel, Part]]:
        """The kernel for each part."""
        return ((self.cache.kernel, part) for part in self.parts)

    def watch_query(self, query: Tensor, mask: Tensor | None) -> None:
        """Once a step hold the mask against the cache, and note the queries `[B, Hq, Q, D]` if a stage needs them."""
        if self is self.cache.compressed_layers[0]:
            watch_mask(self.cache, self.seen - query.shape[2], query.shape[2], mask)
        if self.queries.limit and self.cache.watching:
            self.queries.append(query, self.cache.trailing_padding + self.cache.spare)

    def watch_output(self, output: Tensor) -> None:
        """Keep the heads' outputs `[B, Q, Hq, D]` if a stage needs them."""
        if self.outputs.limit and self.cache.watching:
            self.outputs.append(output.transpose(1, 2), self.cache.trailing_padding + self.cache.spare)

    def recent_bias(self, length: int, mask: Tensor | None) -> Tensor | None:
        """Bias for `length` queries on the recent tokens, fp32, or None if all of them are visible."""
        own = self.cache.recent_validity_bias
        if own is not None:  # of all layers, but each may be on a device of its own
            own = own.to(self.recent.keys.device)
        if mask is None:  # transformers leaves out a mask that is plainly causal
            if length == 1:
                return own
            visible_columns = torch.ones(length, self.recent.length, dtype=torch.bool, device=self.recent.keys.device)
            mask = visible_columns.tril(self.recent.length - length)[None, None]
        bias = as_bias(mask)
        return bias if own is None else bias + own

    def keep_watched(self, columns: int) -> None:
        """Let go of the queries and heads' outputs of all but the last columns."""
        for tail in (self.queries, self.outputs):
            tail.keep_last(min(columns, tail.length))

    def observe(self, needs: Needs) -> LayerObservation:
        """What was seen of the recent tokens, cut down to what is needed."""
        queries = self._last(self.queries, needs.queries)
        return LayerObservation(
            self.ordered(self.recent.keys),
            self.recent.values,
            None if queries is None else self.ordered(queries),
            self._last(self.outputs, needs.head_outputs),
        )

    def ordered(self, rows: Tensor) -> Tensor:
        """Keys or queries `[..., D]` with their channels as stages, and so parts, have them."""
        if self.order is None:
            return rows
        self.order = self.order.to(rows.device)
        return rows[..., self.order]

    def _last(self, tail: Tail, amount: int | str) -> Tensor | None:
        if not amount:
            return None
        return tail.tensor(None if amount == "all" else int(amount) + self.cache.trailing_padding)

    def hand_over(self, other: CompressedLayer) -> None:
        """Give another layer all that this one holds; storage is shared until one of them writes."""
        other.parts, other.recent, other.seen = self.parts, self.recent.fork(), self.seen
        other.queries, other.outputs = self.queries.fork(), self.outputs.fork()
        other.is_initialized = self.is_initialized

    def restore(
        self,
        parts: tuple[Part, ...],
        seen: int,
        recent: tuple[Tensor, Tensor],
        queries: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Hold what another layer held."""
        self.parts, self.seen, self.is_initialized = parts, seen, True
        self.recent.restore(*recent)
        self.queries.restore(queries)
        self.outputs.restore(outputs)

    def get_seq_length(self) -> int:
        """Tokens seen: positions and masks derive from it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the exact recent tokens; what is compressed came before and needs none."""
        return self.recent.length + query_length, self.seen - self.recent.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.parts, self.recent, self.seen, self.is_initialized = (), Recent(), 0, False
        self.queries, self.outputs = Tail(self.queries.limit, 2), Tail(self.outputs.limit, 2)

    def picked(self, rows: Sequence[int]) -> tuple[Part, ...]:
        """The parts of these batch rows alone."""
        batch = self.recent.keys.shape[0]
        return tuple(
            replace(part, encoded=part.encoder.select(part.encoded, rows, batch, part.state)) for part in self.parts
        )

    def select(self, rows: Tensor, parts: tuple[Part, ...]) -> None:
        """Keep these batch rows, whose parts were picked already."""
        self.parts = parts
        for held in (self.recent, self.queries, self.outputs):
            held.select(rows)

    def drop_last(self, columns: int) -> None:
        """Forget the last columns, which are exact."""
        self.seen -= columns
        for held in (self.recent, self.queries, self.outputs):
            held.drop_last(columns)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done by the cache, for all layers at once."""
        raise NotImplementedError("Call reorder_cache of the cache, not of one layer.")

    def crop(self, tokens_to_remove: int) -> None:
        """Done by the cache, for all layers at once."""
        raise NotImplementedError("Call crop of the cache, not of one layer.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Done by the cache, for all layers at once."""
        raise NotImplementedError("Call batch_repeat_interleave of the cache, not of one layer.")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Done by the cache, for all layers at once."""
        raise NotImplementedError("Call batch_select_indices of the cache, not of one layer.")

    def offload(self) -> None:
        """Not supported yet."""
        raise NotImplementedError("offload is not supported by kvframe's cache yet.")

    def prefetch(self) -> None:
        """Not supported yet."""
        raise NotImplementedError("prefetch is not supported by kvframe's cache yet.")
