"""Encoders with several grades: each grade binds, learns and codes by itself, and a layer's state is one for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from kvframe.contracts import blaming
from kvframe.errors import StageError
from kvframe.ops.spend_grades import SLACK
from kvframe.ragged import pick_rows
from kvframe.stages import Encoder
from kvframe.types import Entries, Grades, LayerPlan, ModelInfo, Observation


def bind(encoders: Sequence[Encoder], model: ModelInfo) -> Any:
    """What the encoders loaded: that of the only one, or a tuple of theirs for each layer; None if they learn from the
    prompt."""
    bound = []
    for encoder in encoders:
        with blaming(encoder):
            bound.append(encoder.bind(model))
    if len(bound) == 1:
        return bound[0]
    return None if any(each is None for each in bound) else list(zip(*bound, strict=True))


def fit(encoders: Sequence[Encoder], observation: Observation, bound: Any) -> Sequence[Any]:
    """The states of all layers, from `bind`'s result or the observation."""
    if len(encoders) == 1:
        return encoders[0].fit(observation, bound)
    given = [None] * len(encoders) if bound is None else list(zip(*bound, strict=True))
    learned = [encoder.fit(observation, mine) for encoder, mine in zip(encoders, given, strict=True)]
    states = list(zip(*learned, strict=True))
    if bound is None:
        return states
    layers = zip(states, bound, strict=True)
    same = all(new is old for layer in layers for new, old in zip(*layer, strict=True))
    # One object for both, so that nothing is moved or counted twice.
    return bound if same else states


def offered(encoder: Encoder) -> tuple[Encoder, ...]:
    """The encoders of its grades. Raises StageError if it offers anything else, or nothing."""
    with blaming(encoder):
        offers = encoder.grades()
    listed = tuple(offers) if isinstance(offers, Sequence) else ()
    if not listed or not all(isinstance(each, Encoder) for each in listed):
        raise StageError(
            f"encoder '{encoder.name}' must offer a list of encoders as its grades, but offers {offers!r}."
        )
    return listed


def grades(encoders: Sequence[Encoder], states: Sequence[Any], bits: Sequence[float]) -> Grades:
    """What an allocator is told of the encoders, whose entries cost `bits`. Raises StageError if these do not rise from
    above 0, or an error is no share."""
    # NaN compares as False, so it is found too.
    if not all(a < b < math.inf for a, b in pairwise((0.0, *bits))):
        raise StageError(
            f"encoder '{encoders[0].name}' must offer its grades from the cheapest on, but they cost {list(bits)} bits."
        )
    error: list[list[float]] = []
    for layer, state in enumerate(states):
        error.append([])
        for encoder, part in zip(encoders, state, strict=True):
            with blaming(encoder):
                lost = float(encoder.error(part))
            if not -SLACK <= lost <= 1 + SLACK:
                raise StageError(
                    f"encoder '{encoder.name}' must say which share (0 to 1) coding an entry loses, but its error in "
                    f"layer {layer} is {lost:g}."
                )
            error[-1].append(lost)
    return Grades(tuple(each / bits[-1] for each in bits), torch.tensor(error), encoders[0].block)


def by_grade(
    plan: LayerPlan, entries: Entries, encoders: Sequence[Encoder], state: Any
) -> Iterator[tuple[Encoder, Entries, Any]]:
    """Each grade's encoder, its entries, of which there are some, and its state."""
    if plan.grade is None:
        if len(entries.keys):
            yield encoders[0], entries, state
        return
    for number, encoder in enumerate(encoders):
        kept = plan.grade == number
        if bool(kept.any()):
            yield encoder, entries if bool(kept.all()) else pick_rows(entries, kept), state[number]
