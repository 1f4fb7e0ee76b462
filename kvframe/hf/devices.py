"""Where a cache is: moving it, and waiting for the devices that its layers are on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from kvframe.arguments import expect
from kvframe.errors import InputError
from kvframe.hf.info import layer_devices, model_info
from kvframe.hf.layer import CompressedLayer
from kvframe.hf.recurrent import move as move_own
from kvframe.hf.recurrent import own_layers
from kvframe.placement import on
from kvframe.types import Part

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def finish(devices: Iterable[torch.device]) -> None:
    """Wait until these devices have done what they were given; the CPU has at once."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def usable(device: torch.device | str) -> torch.device:
    """A device by its name. Raises InputError for one that cannot be used here."""
    expect("device", device, (str, torch.device, int), "the name of a device, such as 'cpu' or 'cuda:0'")
    try:
        # Naming a device is not enough to know that it is there.
        return torch.empty(0, device=device).device
    # Without CUDA support torch raises an AssertionError.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"device {device!r} cannot be used here ({reason}); pass another, such as 'cpu'.") from error


def move(cache: CompressedCache, device: torch.device) -> None:
    """Move all that the cache holds; its model must be there already, or follow. Of a model on several devices each
    layer's goes to its own, and the rest to the first layer's.

    Raises InputError for a device that such a model has nothing on."""
    model = cache.live_model()
    cache.info = model_info(model)
    several = set(cache.info.devices)
    places = layer_devices(model) if len(several) > 1 else {}
    if places and device not in several:
        raise InputError(
            f"The layers of this model are on {', '.join(sorted(map(str, several)))}, and its cache must be there too, "
            f"not on {device}; name one of them, and each layer goes to its own."
        )
    home = cache.info.devices[0] if places else device
    made: dict[Any, Any] = {}

    def state_of(state: Any, to: torch.device) -> Any:
        # Codes are joined with those made with the same state, so each must stay one object.
        if (id(state), to) not in made:
            parts = tuple(state_of(part, to) for part in state) if type(state) is tuple else on(state, to)
            made[id(state), to] = parts
        return made[id(state), to]

    states = cache.states
    for index, layer in enumerate(cache.layers):
        to = places.get(index, home)
        if isinstance(layer, CompressedLayer):
            layer.parts = tuple(_part(part, state_of(part.state, to), to) for part in layer.parts)
            for held in (layer.recent, layer.queries, layer.outputs):
                held.to(to)
        for own in own_layers([layer]):
            move_own(own, to)
    if states is not None:
        own = (places.get(index, home) for index in cache.info.layer_ids)
        cache.states = [state_of(state, to) for state, to in zip(states, own, strict=True)]
    if states is not None and states is cache.bound:
        cache.bound = cache.states
    elif not places:
        cache.bound = on(cache.bound, home)
    cache.watch.to(home)
    cache.columns.to(home)
    for name in ("tokens", "begun", "context", "allowed", "kept", "owed"):
        setattr(cache.ledger, name, on(getattr(cache.ledger, name), home))
    for name in ("valid", "positions", "recent_validity_bias"):
        setattr(cache, name, on(getattr(cache, name), home))


def _part(part: Part, state: Any, device: torch.device) -> Part:
    encoded = on(part.encoded, device)
    return part if encoded is part.encoded and state is part.state else Part(encoded, part.encoder, state)
