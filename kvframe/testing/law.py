"""A law: a sentence that holds for every stage of a kind, and the property that tests it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, core, given, settings
from hypothesis.errors import Flaky, HypothesisException, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from kvframe.errors import InputError, KvframeError

PROFILE = "KVFRAME_PROFILE"
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}
# The two quick ones draw the same cases at every run and keep nothing on disk.
_REPEATABLE = {**_COMMON, "derandomize": True, "database": None, "verbosity": Verbosity.quiet}
PROFILES = {
    "dev": settings(max_examples=8, **_REPEATABLE),  # type: ignore[arg-type]
    "ci": settings(max_examples=20, **_REPEATABLE),  # type: ignore[arg-type]
    "deep": settings(max_examples=400, **_COMMON),  # type: ignore[arg-type]
}


class ConformanceError(KvframeError, AssertionError):
    """A stage or a spec breaks a law."""


class BrokenError(Exception):
    """Raised inside a law: what was expected and what came."""


def expect(holds: Any, expected: str, got: str = "") -> None:
    """Raise BrokenError unless `holds`."""
    if not bool(holds):
        raise BrokenError(f"expected {expected}" + (f", got {got}" if got else ""))


def profile_settings(profile: str | None = None) -> settings:
    """The hypothesis settings of a profile; None = the environment's KVFRAME_PROFILE, or `ci`."""
    name = profile or os.environ.get(PROFILE) or "ci"
    if name not in PROFILES:
        raise InputError(f"There is no profile '{name}'; there are: {', '.join(PROFILES)}.")
    return PROFILES[name]


@dataclass(frozen=True, eq=False)
class Law:
    """One law. Calling it with a stage (a pipeline, for the laws of specs) returns None or raises ConformanceError,
    whose message names the stage, the law, the smallest case found and what was expected.

    Attributes:
        name: how `expected_failures` and test ids call it.
        kind: the stage kind whose law it is; "stage" = every kind's, "pipeline" = a spec's.
        text: the law, one sentence.
        body: called with the stage and a drawn case, or with the stage alone if there are no `cases`.
        cases: gives the strategy for a stage.
        applies: whether the law says anything of a stage.
        weight: examples of this law / examples of the profile.
    """

    name: str
    kind: str
    text: str
    body: Callable[..., None]
    cases: Callable[[Any], SearchStrategy[Any]] | None = None
    applies: Callable[[Any], bool] = lambda stage: True
    weight: float = 1.0

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<law {self.name} of a {self.kind}>"

    def __call__(self, stage: Any, *, profile: str | None = None, shrink: bool = True, share: float = 1.0) -> None:
        """Hold the stage to the law. `share`: draw that part of the profile's cases."""
        if self.cases is None:
            with quiet_torch():
                self._once(stage)
            return
        base = profile_settings(profile)
        phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
        count = max(2, round(base.max_examples * self.weight * share))

        if getattr(core, "global_force_seed", None) is not None:
            # Who gives a seed wants the cases of that seed.
            base = settings(base, derandomize=False)

        @settings(base, max_examples=count, phases=phases)
        @given(self.cases(stage))
        def once(case: Any) -> None:
            with quiet_torch():
                self._once(stage, case)

        try:
            once()
        except ConformanceError as error:
            # A new error: hypothesis adds notes on its own inner function to the one that it raises.
            raise ConformanceError(str(error)) from error.__cause__
        except Flaky as error:
            reason = "expected the same outcome for the same case, got one that changes from call to call"
            raise ConformanceError(self._message(stage, reason)) from error
        except Unsatisfiable as error:
            reason = "expected to be usable on one of the drawn models at least, got none that it accepts"
            raise ConformanceError(self._message(stage, reason)) from error

    def _once(self, stage: Any, *case: Any) -> None:
        try:
            self.body(stage, *case)
        except HypothesisException:
            raise
        except BrokenError as error:
            raise ConformanceError(self._message(stage, str(error), *case)) from error
        except Exception as error:
            reason = f"expected no error, got {type(error).__name__}: {error}"
            raise ConformanceError(self._message(stage, reason, *case)) from error

    def _message(self, stage: Any, reason: str, *case: Any) -> str:
        lines = [f"{label(stage)} breaks the law {self.name}: {self.text}", reason]
        return "\n  ".join([*lines, *(f"smallest case: {c!r}" for c in case)])


def law(
    kind: str,
    cases: Callable[[Any], SearchStrategy[Any]] | None = None,
    applies: Callable[[Any], bool] = lambda stage: True,
    weight: float = 1.0,
) -> Callable[[Callable[..., None]], Law]:
    """Make a Law of a function: its name is the law's, its docstring the sentence."""

    def make(body: Callable[..., None]) -> Law:
        text = " ".join((body.__doc__ or "").split())
        return Law(body.__name__, kind, text, body, cases, applies, weight)

    return make


def label(stage: Any) -> str:
    """What a stage or a pipeline is called in messages: kind, name, and the fields that are not at their default."""
    if (spec := getattr(stage, "spec", None)) is not None:
        return f"spec '{stage.name}' ({', '.join(str(s.name) for s in stage.stages)}; {spec.budget!r})"
    return f"{stage.kind} '{stage.name}'{_changed(stage)}"


def identifier(stage: Any) -> str:
    """The same for test ids."""
    return stage.name if hasattr(stage, "spec") else f"{stage.name}{_changed(stage)}"


def _changed(stage: Any) -> str:
    given = {
        name: value
        for name, info in type(stage).model_fields.items()
        if name != "name" and (value := getattr(stage, name)) != info.get_default(call_default_factory=True)
    }
    return f"({', '.join(f'{name}={value!r}' for name, value in given.items())})" if given else ""


@contextmanager
def quiet_torch() -> Iterator[None]:
    """No gradients, as in inference, and a global random state of its own: drawing from it must not make a law pass in
    one run and fail in the next."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
