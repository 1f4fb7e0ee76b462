"""The positions of a call's tokens: as the model passes them to its attention, or as its decoder was told them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvframe.errors import ModelError
from kvframe.hf.finding import decoder_of
from kvframe.hf.hook import Hook, called_with
from kvframe.hf.probe import probe

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


class Positions:
    """Finds positions `[B, Q]`. A hook stands on the decoder only if that keeps them to itself, only while the cache
    lives, and it looks only at calls made with that cache."""

    def __init__(self, model: PreTrainedModel, cache: CompressedCache, layer: int) -> None:
        self._told: Tensor | None = None
        self._listens = "position_ids" not in (probe(model).near[layer].told or {})
        if self._listens:
            owner: weakref.ref[CompressedCache] = weakref.ref(cache)
            mine = weakref.ref(self)

            def listen(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                if (positions := mine()) is not None and called_with(owner, kwargs) is not None:
                    positions._told = kwargs.get("position_ids")

            weakref.finalize(cache, decoder_of(model).register_forward_pre_hook(Hook(listen), with_kwargs=True).remove)

    def of(self, passed_on: dict[str, Any], new: Tensor, seen: int) -> Tensor:
        """Positions int64 `[B, Q]` of `new` keys `[B, H, Q, D]`, of which an attention gets `passed_on`; `seen` columns
        came before. Raises ModelError where they cannot be known, or are more than one a token."""
        batch, _, length, _ = new.shape
        found: Tensor | None = passed_on.get("position_ids")
        if found is None and not self._listens:
            raise ModelError("The model passes no position_ids to its attention, so positions cannot be known.")
        if found is None:
            # A decoder that is told nothing counts columns.
            found = (torch.arange(length) + seen)[None] if self._told is None else self._told
        if found.ndim != 2:
            raise ModelError(
                f"The model's position_ids have {found.ndim} dimensions; kvframe knows one position a token, [B, T]."
            )
        return found.expand(batch, length).to(new.device)
