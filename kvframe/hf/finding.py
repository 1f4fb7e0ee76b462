"""Which layers of a model can be compressed, and which of its modules attend in them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvframe.errors import ModelError
from kvframe.hf.probe import unwrapped
from kvframe.hf.projections import output_projection

# Full attention, alone or beside something that recurs. Whatever else a layer may be bounds its memory itself.
COMPRESSIBLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that holds its layers: itself if there is nothing around it."""
    model = unwrapped(model)
    found = model.get_decoder()
    # Some models have no such method of their own, and what transformers finds by name is then the model, or its head.
    if isinstance(found, PreTrainedModel) and found is not model:
        return found
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)


def blocks_of(model: PreTrainedModel) -> list[Any]:
    """The model's layers, in their order; empty for a model that keeps them elsewhere."""
    return list(getattr(decoder_of(model), "layers", ()))


def fresh_layers(model: PreTrainedModel) -> list[Any]:
    """The empty cache layers that transformers makes for this model, one a model layer."""
    return DynamicCache(config=model.config).layers


def compressible_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Indices of the layers with full attention.

    Raises ModelError if there are none, or if the model takes no cache but one of its own kind."""
    if own := _own_cache(model):
        raise ModelError(
            f"{type(model).__name__} takes no cache but its own kind, {own}, which a kvframe cache cannot replace; "
            "use a model that takes the caches of transformers."
        )
    layers = fresh_layers(model)
    found = tuple(i for i, layer in enumerate(layers) if type(layer) in COMPRESSIBLE)
    if not found:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        slides = any(getattr(layer, "is_sliding", False) for layer in layers)
        remedy = "if the model allows it, set config.sliding_window = None before loading"
        raise ModelError(
            f"{type(model).__name__} has no layer with full attention (its cache layers are: {kinds}), so nothing "
            f"can be compressed; {remedy if slides else 'use a model that has some'}."
        )
    return found


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The model's attention modules."""
    return [module for module in model.modules() if _is_attention(module)]


def attention_by_layer(model: PreTrainedModel) -> dict[int, Any]:
    """The attention module of each layer that has one, by the layer's index in the model, as names and places say. A
    module that several layers share stands for each of them."""
    known: list[Any] = attention_modules(model)
    # A module that layers share has no index of its own, or one that stands for none.
    found = {module.layer_idx: module for module in known if module.layer_idx is not None and module.layer_idx >= 0}
    for index, block in enumerate(blocks_of(model)):
        inside = [module for module in block.modules() if _is_attention(module)]
        if index not in found and len(inside) == 1:
            found[index] = inside[0]
    return found


def _is_attention(module: nn.Module) -> bool:
    """Whether a module projects heads, and asks for a function that lets them attend: what recurs does not."""
    sized = any(hasattr(module, name) for name in ("head_dim", "head_size"))
    asks = "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names
    return hasattr(module, "layer_idx") and sized and output_projection(module) is not None and asks


def _own_cache(model: PreTrainedModel) -> str:
    """The name of the cache class that comes with a model's own code; "" if none does."""
    home = type(unwrapped(model)).__module__
    beside = vars(sys.modules[home]).values()
    found = (kind for kind in beside if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == home)
    return next((kind.__name__ for kind in found), "")
