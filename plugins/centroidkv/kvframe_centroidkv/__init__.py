"""CentroidKV as kvframe stages: entries that stand for groups of similar tokens, found by chunked soft matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_centroidkv.allocator import SoftMatching


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The allocator."""
    return (SoftMatching,)


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """Our best reading, and the literal one."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
