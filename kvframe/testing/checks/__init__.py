"""The laws, one module for each stage kind. `LAWS` gives them by kind; "stage" = every kind's, "pipeline" = a
spec's."""

from __future__ import annotations

from types import ModuleType

from kvframe.testing.checks import allocator, encoder, kernel, pipeline, saved, scorer, segmenter, stage
from kvframe.testing.law import Law


def _laws_in(module: ModuleType) -> tuple[Law, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Law))


LAWS: dict[str, tuple[Law, ...]] = {
    "stage": _laws_in(stage),
    "segmenter": _laws_in(segmenter),
    "scorer": _laws_in(scorer),
    "allocator": _laws_in(allocator),
    "encoder": _laws_in(encoder),
    "attention": _laws_in(kernel),
    "pipeline": _laws_in(pipeline) + _laws_in(saved),
}
