"""Whether the recurrent layers of a model can go on from their state with several tokens at once. Some can not: they
begin anew, and say nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from kvframe.hf.finding import fresh_layers
from kvframe.plain import held_tensors

TOKENS = 6  # read for the trial, twice
_known: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def goes_on(model: PreTrainedModel) -> bool:
    """Whether the first recurrent layer comes to the same states, but for rounding, when a few tokens are read at once
    and in two halves. Tried once for each model; a model in which nothing recurs is not tried."""
    recurrent = [i for i, layer in enumerate(fresh_layers(model)) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not recurrent:
        return True
    if model not in _known:
        whole, halves = (_states(model, pieces, recurrent[0]) for pieces in (1, 2))
        _known[model] = all(_alike(*pair) for pair in zip(whole, halves, strict=True))
    return _known[model]


def _states(model: PreTrainedModel, pieces: int, layer: int) -> list[Tensor]:
    cache, tokens = DynamicCache(config=model.config), torch.arange(1, 1 + TOKENS, device=model.device)[None]
    for piece in tokens.chunk(pieces, 1):
        begin = cache.get_seq_length()
        positions = torch.arange(begin, begin + piece.shape[1], device=model.device)[None]
        model(piece, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
    own: Any = cache.layers[layer]
    return list(held_tensors([own.conv_states, own.recurrent_states]))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in the lower half of their digits alone."""
    bound = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((one - other).abs().max() <= bound)
