"""The two hooks of a kvframe plugin. A plugin is a module named by an entry point of the group `kvframe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable

import pluggy

from kvframe.stages import Stage

hookspec = pluggy.HookspecMarker("kvframe")
hookimpl = pluggy.HookimplMarker("kvframe")


@hookspec
def kvframe_register_stages() -> Iterable[type[Stage]]:  # type: ignore[empty-body]
    """Return the stage classes that this plugin offers, of any kind. Their names must be
    `<entry-point name>.<stage>`."""


@hookspec
def kvframe_register_specs() -> Mapping[str, Traversable]:  # type: ignore[empty-body]
    """Return named pipeline specs: name -> YAML file (an `importlib.resources` path)."""
