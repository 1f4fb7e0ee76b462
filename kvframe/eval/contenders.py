"""The pipelines that are compared: each spec at each ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvframe.errors import InputError
from kvframe.pipeline import Pipeline, load
from kvframe.specfile import spec_source


@dataclass(frozen=True)
class Contender:
    """One row of the table: a pipeline with a budget."""

    label: str
    pipeline: Pipeline

    @property
    def fingerprint(self) -> str:
        """The spec's."""
        return self.pipeline.spec.fingerprint

    @property
    def budget(self) -> str:
        """The budget in short: "4x" or "4x bytes" a ratio, "96 entries" a number of them per head, "64.0MiB" bytes,
        "all" none."""
        spec = self.pipeline.spec
        if spec.allocator.keeps_all:
            return "all"
        if spec.budget.ratio is not None:
            return f"{spec.budget.ratio:g}x" + (" bytes" if spec.budget.of == "bytes" else "")
        if spec.budget.entries is not None:
            return f"{spec.budget.entries} entries"
        return "" if spec.budget.bytes is None else spec.budget.bytes.human_readable()


def make_contenders(
    specs: Sequence[str], ratios: Sequence[float] = (), overrides: Mapping[str, Any] | None = None
) -> list[Contender]:
    """Every spec, with `overrides` set in it, at every ratio, in that order; without ratios, each with the budget that
    it has then.

    A spec that keeps every entry comes once. Raises SpecError for a spec that cannot be read, InputError for none, or
    for two that are the same pipeline."""
    if not specs:
        raise InputError("No spec is named; name at least one.")
    made: list[Contender] = []
    seen: dict[str, str] = {}
    for spec in specs:
        source = spec_source(spec)
        pipeline = load(source, overrides)
        label = pipeline.name if sum(load_name(s) == pipeline.name for s in specs) == 1 else spec
        if ratios and not pipeline.spec.allocator.keeps_all:
            pipelines = [load(source, {**(overrides or {}), "budget.ratio": ratio}) for ratio in ratios]
        else:
            pipelines = [pipeline]
        for each in pipelines:
            contender = Contender(label, each)
            name = f"{label} {contender.budget}"
            if (other := seen.get(contender.fingerprint)) is not None:
                twice = "stands twice" if other == name else f"is the same pipeline as '{other}'"
                raise InputError(f"'{name}' {twice}; name it once.")
            seen[contender.fingerprint] = name
            made.append(contender)
    return made


def load_name(spec: str) -> str:
    """The name that a loaded spec has."""
    source = spec_source(spec)
    return source.stem if isinstance(source, Path) else source
