"""Cluster forests: the merges of chunked soft matching, priced and pruned exactly under one budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_forest.allocator import Pruned


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The allocator."""
    return (Pruned,)


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """The forest with its defaults."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
