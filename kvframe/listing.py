"""What is installed, as `kvframe list` shows it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframe.errors import SpecError
from kvframe.registry import DISABLE, Registry, disabled_plugins, registry
from kvframe.spec import read_spec

if TYPE_CHECKING:
    from rich.console import Console

    from kvframe.stages import Stage


def print_registry(console: Console) -> None:
    """Print plugins, stages by kind and specs. Raises PluginError if a plugin cannot be used."""
    known = registry()
    plugins = [(p.name, p.distribution, p.version) for p in known.plugins]
    _print(console, ("plugin", "distribution", "version"), plugins)
    for kind, classes in known.stages.items():
        rows = [(name, known.owners[f"{kind}:{name}"].name, about(stage)) for name, stage in classes.items()]
        _print(console, (kind, "plugin", "what it does"), rows)
    _print(console, ("spec", "plugin", "what it does"), spec_rows(known))


def print_plugins(console: Console) -> None:
    """Print each plugin with its distribution, version, stages and their papers, and which plugins are switched off.
    Raises PluginError if a plugin cannot be used."""
    known = registry()
    rows = []
    for plugin in known.plugins:
        begin = (plugin.name, plugin.distribution, plugin.version)
        stages = [
            (kind, name, stage.paper)
            for kind, classes in known.stages.items()
            for name, stage in classes.items()
            if known.owners[f"{kind}:{name}"] is plugin
        ]
        rows += [(*(begin if not index else ("", "", "")), *stage) for index, stage in enumerate(stages)]
        specs = sorted(name for name in known.specs if known.owners[f"spec:{name}"] is plugin)
        rows.append((*(begin if not stages else ("", "", "")), "specs", ", ".join(specs) or "none", ""))
    _print(console, ("plugin", "distribution", "version", "kind", "name", "paper"), rows)
    if disabled := disabled_plugins():
        console.print(f"Switched off by {DISABLE}: {', '.join(sorted(disabled))}")


def spec_rows(known: Registry) -> list[tuple[str, str, str]]:
    """Name, plugin and description of each spec; for one that cannot be read, why."""
    rows = []
    for name in sorted(known.specs):
        try:
            text = read_spec(name).description
        except SpecError as error:
            text = f"broken: {error}"
        rows.append((name, known.owners[f"spec:{name}"].name, text))
    return rows


def about(stage: type[Stage]) -> str:
    """The first sentence of a stage's docstring, and its paper."""
    paragraph = " ".join((inspect.getdoc(stage) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph)[0]
    return f"{sentence} [{stage.paper}]" if stage.paper else sentence


def _print(console: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, no_wrap=index < 2)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()
