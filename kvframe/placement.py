"""Models whose layers live on several devices. What the stages see of all layers together is brought to one device,
the home of the observation; what follows for a layer goes to the layer's own. Where all is on one device, everything
here hands back what it was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from kvframe.plain import held_tensors, map_tensors
from kvframe.types import Observation

T = TypeVar("T")


def on(value: T, device: torch.device) -> T:
    """`value` with all its tensors on a device; `value` itself if they are there."""
    if all(tensor.device == device for tensor in held_tensors(value)):
        return value
    moved: T = map_tensors(value, lambda tensor: tensor.to(device))
    return moved


def spread(values: Sequence[T], devices: Iterable[torch.device]) -> Sequence[T]:
    """Each layer's value on its layer's device; `values` itself if all of them are there."""
    moved = [on(value, device) for value, device in zip(values, devices, strict=True)]
    return values if all(old is new for old, new in zip(values, moved, strict=True)) else moved


def gathered(observation: Observation) -> Observation:
    """The observation as stages see it, all of it where its `valid` is; itself if it is there."""
    parts = {name: getattr(observation, name) for name in ("layers", "hidden_states", "surprisal")}
    moved = {name: on(part, observation.valid.device) for name, part in parts.items()}
    return observation if all(moved[name] is parts[name] for name in parts) else replace(observation, **moved)
