"""Runs kvframe's laws from the shell, with a progress bar and a table of what came out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvframe.errors import InputError
from kvframe.naming import nearest
from kvframe.pipeline import Pipeline, load
from kvframe.registry import Plugin, Registry, registry
from kvframe.specfile import spec_source
from kvframe.stages import Stage

if TYPE_CHECKING:
    from rich.console import Console

    from kvframe.testing import CheckResult

Subject = Stage | Pipeline


def check_target(
    target: str, profile: str | None, overrides: Mapping[str, Any], console: Console, progress: Console
) -> bool:
    """Hold everything that `target` names to its laws, print a table and what was broken; return whether all held.

    Raises InputError for a target that names nothing, or if hypothesis is not installed."""
    if importlib.util.find_spec("hypothesis") is None:
        raise InputError("kvframe check needs hypothesis; install it with: pip install 'kvframe[testing]'")
    found = subjects(target, overrides)
    results = list(_run(found, profile, progress))
    _print_table(console, results)
    broken = [result for _, result in results if not result.passed]
    for result in broken:
        console.print()
        console.print(result.message, markup=False, highlight=False, style="red")
    verdict = f"{len(broken)} of {len(results)} checks failed" if broken else f"All {len(results)} checks passed"
    console.print(f"\n{verdict}.", style="bold", highlight=False)
    return not broken


def subjects(target: str, overrides: Mapping[str, Any] | None = None) -> list[Subject]:
    """What a name stands for: a plugin (by entry-point name, distribution or package: all its stages, at their
    defaults and with each of their choices, and its specs), or a stage, or a spec, or a spec's file. Where a plugin and
    a spec share a name, "spec:NAME" is the spec; "scorer:NAME" and the like name stages.

    Raises InputError for a name that stands for nothing, or for overrides where there is no spec."""
    from kvframe.testing import variants

    known, overrides = registry(), overrides or {}
    source = spec_source(target)
    if isinstance(source, Path) and not source.is_dir():
        return [load(source, overrides)]
    kind, colon, rest = target.partition(":")
    only = kind if colon and kind in ("spec", *known.stages) else ""
    name = rest if only else target.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    plugins = [plugin for plugin in known.plugins if not only and name in _names_of(plugin)]
    found: list[Subject] = []
    for plugin in plugins:
        for kind, classes in known.stages.items():
            for stage_name, stage in classes.items():
                if known.owners[f"{kind}:{stage_name}"] is plugin:
                    found += variants(stage)
        found += [load(n, overrides) for n in sorted(known.specs) if known.owners[f"spec:{n}"] is plugin]
    if not plugins:
        kinds = [only] if only in known.stages else [] if only else list(known.stages)
        found += [v for kind in kinds if name in known.stages[kind] for v in variants(known.stages[kind][name])]
        found += [load(name, overrides)] if name in known.specs and only in ("", "spec") else []
    if not found:
        raise InputError(f"Nothing to check is named '{target}'{nearest(name, _choices(known, only))}")
    if overrides and not any(isinstance(subject, Pipeline) for subject in found):
        raise InputError(f"--set changes specs, but '{target}' is no spec; leave it out.")
    return found


def _names_of(plugin: Plugin) -> set[str]:
    """The entry-point name, also with hyphens; the package; the distribution, unless it brings several plugins."""
    found = {plugin.name, plugin.name.replace("_", "-"), f"kvframe_{plugin.name.replace('-', '_')}"}
    if sum(other.distribution == plugin.distribution for other in registry().plugins) == 1:
        found |= {plugin.distribution, plugin.distribution.replace("-", "_")}
    return found


def _choices(known: Registry, only: str) -> set[str]:
    """What may be named; `only` = "spec" or a stage kind, "" = everything."""
    if only:
        return set(known.specs if only == "spec" else known.stages[only])
    stages = {name for classes in known.stages.values() for name in classes}
    return {plugin.name for plugin in known.plugins} | stages | set(known.specs)


def _run(found: list[Subject], profile: str | None, console: Console) -> Iterator[tuple[Subject, CheckResult]]:
    """Run the laws one by one under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvframe.testing import laws_of
    from kvframe.testing.law import identifier
    from kvframe.testing.runner import iter_checks

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=sum(len(laws_of(subject)) for subject in found))
        for subject in found:
            progress.update(bar, description=identifier(subject))
            for result in iter_checks(subject, profile=profile):
                yield subject, result
                progress.advance(bar)


def _print_table(console: Console, results: list[tuple[Subject, CheckResult]]) -> None:
    """One row for each stage or spec."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "", "kind", "checked", "laws kept", "seconds", "broken", box=None, header_style="bold", pad_edge=False
    )
    rows: dict[tuple[str, str], list[CheckResult]] = {}
    for subject, result in results:
        kind = "spec" if isinstance(subject, Pipeline) else subject.kind
        rows.setdefault((kind, result.subject), []).append(result)
    for (kind, name), own in rows.items():
        broken = [result.law for result in own if not result.passed]
        mark = Text("✗", "red") if broken else Text("✓", "green")
        kept, seconds = f"{len(own) - len(broken)}/{len(own)}", f"{sum(result.seconds for result in own):.1f}"
        table.add_row(mark, kind, Text(name), kept, seconds, Text(", ".join(broken)))
    console.print(table)
