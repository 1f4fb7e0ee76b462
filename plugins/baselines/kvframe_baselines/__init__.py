"""Published eviction methods and codes as kvframe stages: what new methods are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_baselines.adaptive import Ada
from kvframe_baselines.attention_scorers import H2O, TOVA, SnapKV
from kvframe_baselines.cam import CaM
from kvframe_baselines.chunk import Chunk
from kvframe_baselines.d2o import D2O
from kvframe_baselines.expected_attention import ExpectedAttention
from kvframe_baselines.global_top_k import GlobalTopK
from kvframe_baselines.integer import PerToken
from kvframe_baselines.key_scorers import KeyDiff, KeyNorm
from kvframe_baselines.kivi import Kivi
from kvframe_baselines.positional import Streaming
from kvframe_baselines.pyramid import Pyramid
from kvframe_baselines.rotation import Rotation

SCORERS: tuple[type[Stage], ...] = (Streaming, H2O, SnapKV, TOVA, KeyNorm, KeyDiff, ExpectedAttention)
ALLOCATORS: tuple[type[Stage], ...] = (Pyramid, Ada, Chunk, GlobalTopK, D2O, CaM)
ENCODERS: tuple[type[Stage], ...] = (Kivi, PerToken, Rotation)


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The baselines' scorers, allocators and encoders."""
    return (*SCORERS, *ALLOCATORS, *ENCODERS)


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """One spec for each published method."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
