"""GraceKV (Tian et al. 2026, arXiv 2608.07001): entries of every resolution, one budget over all layers and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe import hookimpl
from kvframe.stages import Stage
from kvframe_gracekv.budget_flow import BudgetFlow
from kvframe_gracekv.exact_flow import ExactFlow
from kvframe_gracekv.graded_flow import GradedFlow
from kvframe_gracekv.segmenter import Curvature
from kvframe_gracekv.value_flow import ValueFlow


@hookimpl
def kvframe_register_stages() -> Iterable[type[Stage]]:
    """The segmenter, the scorer and the allocators."""
    return (Curvature, ValueFlow, BudgetFlow, ExactFlow, GradedFlow)


@hookimpl
def kvframe_register_specs() -> Mapping[str, Traversable]:
    """`gracekv` (our best) and `gracekv-paper` (the paper's constants)."""
    folder = files(__name__) / "specs"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
