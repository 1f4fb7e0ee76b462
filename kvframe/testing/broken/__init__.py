"""Stages that break the laws, each in one way: what a law is tested with, and what its failures look like.

The class variable `breaks` names the laws that reject the stage; the first is the one that it was made for."""

from __future__ import annotations

from kvframe.stages import Stage
from kvframe.testing.broken import allocators, encoders, kernels, pipelines, scorers, segmenters

STAGES: tuple[type[Stage], ...] = tuple(
    value
    for module in (segmenters, scorers, allocators, encoders, kernels)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Stage) and "breaks" in vars(value)
)
PIPELINES = pipelines.BROKEN
