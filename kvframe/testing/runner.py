"""Runs laws: on pytest's parametrisation, or one after the other without pytest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from kvframe.arguments import expect
from kvframe.errors import InputError
from kvframe.registry import nearest
from kvframe.stages import Kernel, Stage
from kvframe.testing.checks import LAWS
from kvframe.testing.device import home
from kvframe.testing.law import ConformanceError, Law, identifier

if TYPE_CHECKING:
    from kvframe.pipeline import Pipeline
    from kvframe.spec import PipelineSpec


@dataclass(frozen=True)
class CheckResult:
    """One law on one stage or spec: `message` says what was broken and on which case, "" if nothing was."""

    subject: str
    law: str
    text: str
    passed: bool
    message: str
    seconds: float


def laws_of(subject: Stage | Pipeline) -> tuple[Law, ...]:
    """The laws that apply to a stage or to a pipeline, in the order in which they are best read. Raises InputError for
    what is neither, such as a stage's class."""
    if not hasattr(subject, "spec"):
        expect("What is checked", subject, Stage, "a stage made of its class, such as MyScorer(), or a pipeline")
    kinds = ("pipeline",) if hasattr(subject, "spec") else ("stage", subject.kind)
    return tuple(law for kind in kinds for law in LAWS[kind] if law.applies(subject))


def why_not(subject: Stage | Pipeline) -> str:
    """Why the laws that run a stage cannot run it on this machine, "" if they can: a kernel for a device that is not
    here."""
    return home(subject)[1] if isinstance(subject, Kernel) else ""


def iter_checks(subject: Stage | Pipeline, *, profile: str | None = None, shrink: bool = True) -> Iterator[CheckResult]:
    """Run the laws one by one, so that progress can be shown; see check_stage. Of a kernel for a device that is not
    here only those that need not run it."""
    reason = why_not(subject)
    for law in laws_of(subject):
        if reason and law.cases is not None:
            continue
        begin = time.perf_counter()
        message = ""
        try:
            law(subject, profile=profile, shrink=shrink)
        except ConformanceError as error:
            message = str(error)
        yield CheckResult(identifier(subject), law.name, law.text, not message, message, time.perf_counter() - begin)


def check_stage(stage: Stage, *, profile: str | None = None, shrink: bool = True) -> list[CheckResult]:
    """Hold a stage to all laws of its kind and return one record a law, the same at every call (profiles `dev` and
    `ci`). `shrink` False: a failing case is not made smaller, which is faster."""
    return list(iter_checks(stage, profile=profile, shrink=shrink))


def check_spec(
    spec: str | Path | PipelineSpec | Pipeline, *, profile: str | None = None, shrink: bool = True
) -> list[CheckResult]:
    """Hold a spec (its name, its file, the spec itself or a pipeline) to the laws of pipelines, on a tiny random model,
    with protected regions cut down to that model's short prompts. Returns as check_stage does."""
    return list(iter_checks(as_pipeline(spec), profile=profile, shrink=shrink))


def as_pipeline(spec: str | Path | PipelineSpec | Pipeline) -> Pipeline:
    """A pipeline of whatever names one."""
    from kvframe.pipeline import Pipeline, load

    if isinstance(spec, Pipeline):
        return spec
    return load(spec) if isinstance(spec, str | Path) else Pipeline(spec)


def parametrize_with_checks(
    subjects: Iterable[Stage | Pipeline], *, expected_failures: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate `def test(stage, check): check(stage)`: one test for each stage or pipeline and each of its laws.

    `expected_failures`: law name -> why it cannot hold. Such a test must fail (strict xfail): a law that holds after
    all is taken off the list. Raises InputError for a law that none of the subjects has."""
    import pytest

    expect("expected_failures", expected_failures, (Mapping, NoneType), "a mapping from laws to reasons")
    expected = dict(expected_failures or {})
    pairs = [(subject, law) for subject in subjects for law in laws_of(subject)]
    for name in expected:
        if name not in (known := {law.name for _, law in pairs}):
            raise InputError(
                f"expected_failures names the law '{name}', which is not one of these{nearest(name, known)}"
            )
    parameters = []
    for subject, law in pairs:
        marks = [pytest.mark.kvframe_law(law.kind, identifier(subject), law.name)]
        if law.cases is not None and (reason := why_not(subject)):
            marks.append(pytest.mark.skip(reason=reason))
        if law.name in expected:
            marks.append(pytest.mark.xfail(reason=expected[law.name], strict=True, raises=ConformanceError))
        parameters.append(pytest.param(subject, law, marks=marks, id=f"{identifier(subject)}-{law.name}"))
    return pytest.mark.parametrize(("stage", "check"), parameters)
