"""AATC: attention-aware transform coding of keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_aatc.encoder import Transform


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The encoder."""
    return (Transform,)


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """The paper's reading and ours."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
