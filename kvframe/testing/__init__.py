"""Property tests for anybody's stage or spec: the laws that every stage kind obeys, run with hypothesis.

    from kvframe.testing import parametrize_with_checks

    @parametrize_with_checks([MyScorer(), MyScorer(window=3), kvframe.load("my-spec")])
    def test_conformance(stage, check):
        check(stage)

Needs the `testing` extra (hypothesis, and pytest for `parametrize_with_checks`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvframe.testing.instances import variants
    from kvframe.testing.law import ConformanceError, Law
    from kvframe.testing.prompt import Geometry, Prompts
    from kvframe.testing.runner import (
        CheckResult,
        check_spec,
        check_stage,
        iter_checks,
        laws_of,
        parametrize_with_checks,
    )
    from kvframe.testing.strategies import (
        entries,
        geometries,
        observations,
        plans,
        prompts,
        scores,
        segmentations,
        specs,
    )

__all__ = [
    "CheckResult",
    "ConformanceError",
    "Geometry",
    "Law",
    "Prompts",
    "check_spec",
    "check_stage",
    "entries",
    "geometries",
    "iter_checks",
    "laws_of",
    "observations",
    "parametrize_with_checks",
    "plans",
    "prompts",
    "scores",
    "segmentations",
    "specs",
    "variants",
]

_HOME = {
    **dict.fromkeys(["ConformanceError", "Law"], "law"),
    **dict.fromkeys(["Geometry", "Prompts"], "prompt"),
    **dict.fromkeys(
        ["CheckResult", "check_spec", "check_stage", "iter_checks", "laws_of", "parametrize_with_checks"], "runner"
    ),
    "variants": "instances",
}


def __getattr__(name: str) -> Any:
    # The pytest plugin lives in this package and is loaded in every test run: it must not import torch.
    if name not in __all__:
        raise AttributeError(f"module 'kvframe.testing' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"kvframe.testing.{_HOME.get(name, 'strategies')}"), name)
