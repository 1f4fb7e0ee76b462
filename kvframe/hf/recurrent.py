"""What recurs in a model beside its attention: states of linear attention, of Mamba, of short convolutions. They are
held as transformers holds them, whatever becomes of the keys and values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kvframe.errors import InputError
from kvframe.hf.layer import CompressedLayer
from kvframe.placement import on
from kvframe.plain import flatten, held_tensors, map_tensors
from kvframe.types import Needs

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache

# Of what a layer holds, these follow from where and how its tensors are.
FOLLOWS = ("device", "dtype")


class RecurrentLayer(CompressedLayer):
    """A compressed layer of a model that attends and recurs in one layer. Its recurrent half is a layer of
    transformers' own."""

    def __init__(self, cache: CompressedCache, needs: Needs, states: int) -> None:
        super().__init__(cache, needs)
        self.beside = LinearAttentionLayer(number_of_states=states)

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The states of convolutions, by their number in the layer."""
        return self.beside.conv_states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The recurrent states, by their number in the layer."""
        return self.beside.recurrent_states

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether there is something to go on from, by the state's number in the layer."""
        return self.beside.has_previous_state

    @property
    def record_past(self) -> bool:
        """Whether states of convolutions are kept until a `crop`."""
        return self.beside.record_past

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # as in transformers, where some layers cannot know yet
        """Whether the last tokens can be taken off again: not from a recurrent state."""
        return self.beside.is_croppable

    def activate_past_recording(self) -> None:
        """Keep states of convolutions until a `crop`."""
        self.beside.activate_past_recording()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers' own layer has it."""
        return self.beside.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers' own layer has it."""
        return self.beside.update_recurrent_state(*args, **kwargs)

    def hand_over(self, other: CompressedLayer) -> None:
        """As CompressedLayer does; the model writes into recurrent states, so the other gets a copy of them."""
        super().hand_over(other)
        if isinstance(other, RecurrentLayer):
            other.beside = copy.deepcopy(self.beside)


# transformers asks for this class before it goes to a layer's states.
LinearAttentionCacheLayerMixin.register(RecurrentLayer)


def compressed_layer(cache: CompressedCache, needs: Needs, own: Any) -> CompressedLayer:
    """The compressed layer that takes the place of transformers' `own`."""
    if isinstance(own, LinearAttentionCacheLayerMixin):
        return RecurrentLayer(cache, needs, own.number_of_states)
    return CompressedLayer(cache, needs)


def own_layers(layers: list[Any]) -> list[Any]:
    """Of the layers of a cache, those that are transformers' own, and the recurrent halves of the others."""
    beside = [layer.beside if isinstance(layer, RecurrentLayer) else layer for layer in layers]
    return [layer for layer in beside if not isinstance(layer, CompressedLayer)]


def forget(layer: Any) -> None:
    """Let go of a layer's recurrent states. transformers sets them to zero when it resets a cache, and keeps the shape
    of the batch that was there."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recorded = layer.record_past
        LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
        layer.record_past = recorded


def move(layer: Any, device: torch.device) -> None:
    """Move all that one of transformers' own layers holds."""
    vars(layer).update(on(vars(layer), device))
    if getattr(layer, "device", None) is not None:
        layer.device = device


def as_data(layer: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """All that one of transformers' own layers holds, for a file: plain data, its tensors in `tensors`. Raises
    InputError for what cannot be written."""
    held = {name: value for name, value in vars(layer).items() if name not in FOLLOWS}
    numbered = {name: list(value.values()) if isinstance(value, dict) else value for name, value in held.items()}
    kind = type(layer).__name__
    try:
        return {"kind": kind, "other": flatten(numbered, tensors, "other.")}
    except InputError as error:
        raise InputError(f"A {kind} of this model cannot be saved: it holds more than tensors and numbers.") from error


def restore(layer: Any, held: dict[str, Any]) -> None:
    """Let one of transformers' own layers, a fresh one, hold what `as_data` wrote of another."""
    for name, value in held.items():
        states = getattr(layer, name, None)
        if isinstance(states, dict):
            # The model writes into its states, and a file that is mapped must stay as it is.
            value = dict(zip(states, map_tensors(value, torch.clone), strict=True))
        setattr(layer, name, value)
    if (some := next(held_tensors(held), None)) is not None:
        layer.device, layer.dtype = some.device, some.dtype
