"""A scorer for kvframe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_lastwords.scorer import Lastwords


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The stages of this plugin."""
    return [Lastwords]


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """The specs of this plugin, by name."""
    return {"lastwords": files(__name__) / "specs" / "lastwords.yaml"}
