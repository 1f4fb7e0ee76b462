"""Specs that combine stages of several plugins: entries chosen or merged by one method, coded by another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """One spec a pair of methods. Each names stages of other plugins, which must be there when it is loaded."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
