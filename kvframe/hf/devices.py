"""Moving a cache to another device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvframe.hf.info import model_info
from kvframe.hf.rows import others
from kvframe.plain import map_tensors
from kvframe.types import Part

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def move(cache: CompressedCache, device: torch.device) -> None:
    """Move all that the cache holds; its model must be there already, or follow."""
    made: dict[int, Any] = {}

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    def state_of(state: Any) -> Any:
        # Codes are joined with those made with the same state, so each must stay one object.
        return made.setdefault(id(state), map_tensors(state, to))

    old = cache.states, cache.bound  # alive, so that no other object takes their ids
    cache.info = model_info(cache.live_model())
    if cache.states is not None:
        cache.states = [state_of(state) for state in cache.states]
    cache.bound = cache.states if old[0] is old[1] and old[1] is not None else map_tensors(cache.bound, to)
    for layer in cache.compressed_layers:
        layer.parts = tuple(
            Part(map_tensors(part.encoded, to), part.encoder, state_of(part.state)) for part in layer.parts
        )
        for held in (layer.recent, layer.queries, layer.outputs):
            held.to(device)
    for other in others(cache):
        if getattr(other, "keys", None) is not None:
            other.keys, other.values, other.device = to(other.keys), to(other.values), device
    cache.watch.to(device)
    for name in ("tokens", "begun", "context", "allowed", "kept"):
        setattr(cache.ledger, name, map_tensors(getattr(cache.ledger, name), to))
    for name in ("valid", "positions", "recent_validity_bias"):
        setattr(cache, name, map_tensors(getattr(cache, name), to))
