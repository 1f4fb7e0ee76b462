"""Attention weights, where a caller asks for them: given while nothing is compressed, else refused before the call
changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvframe.errors import InputError
from kvframe.hf.attention import gives_weights

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def check_weights(cache: CompressedCache, length: int, passed_on: Mapping[str, Any]) -> None:
    """Raise InputError if a call that brings `length` tokens asks for weights that there will not be: of a
    prompt they are the model's own, but compressed entries have none, nor has a step that may compress first."""
    model = cache.live_model()
    asked = passed_on.get("output_attentions", model.config.get_text_config(decoder=True).output_attentions)
    if not asked:
        return
    spec = cache.pipeline.spec
    flushes = spec.prefill.flush is not None or spec.decode.flush is not None
    answers = cache.pending and (length == 1 or cache.drafting)
    compresses = cache.compressed_layers[0].seen > 0 and (flushes or answers)
    if compresses or cache.ledger.compressions:
        raise InputError(
            "Attention weights (output_attentions) cannot be had over a compressed cache, whose entries may stand for "
            "several tokens or none; call the model without output_attentions, or with it for the prompt alone."
        )
    if not gives_weights(model):
        raise InputError(
            "Attention weights (output_attentions) are given by the attention implementation 'eager' alone; call "
            "model.set_attn_implementation('eager') before the cache is made, or leave output_attentions out."
        )
