"""Says what a spec does: its stages with their parameters, what they need, their flags, and an estimate of its size."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kvframe.authoring.estimate import Estimate
from kvframe.bias import UnbiasedEncoder
from kvframe.pipeline import Pipeline
from kvframe.registry import registry
from kvframe.report import size_text
from kvframe.stages import Allocator, Encoder, Stage
from kvframe.types import Needs

if TYPE_CHECKING:
    from rich.console import Console

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def print_explanation(pipeline: Pipeline, console: Console, size: Estimate | None = None) -> None:
    """Print the explanation of a spec, and the estimate if there is one."""
    from rich.padding import Padding
    from rich.text import Text

    spec = pipeline.spec
    console.print(Text.assemble((f"{pipeline.name}", "bold"), f"  fingerprint {spec.fingerprint}"))
    if spec.description:
        console.print(Text(spec.description))
    for section in ("budget", "protect", "decode"):
        console.print()
        console.print(Text(section, style="bold"))
        rows = parameters(getattr(spec, section))
        # The three budgets are alternatives.
        _print_rows(console, [row for row in rows if section != "budget" or not row[0].endswith(": null")])
    for stage in pipeline.stages:
        owner = registry().owners.get(f"{stage.kind}:{stage.name}")
        console.print()
        console.print(Text.assemble((f"{stage.kind}: {stage.name}", "bold"), f"  from {owner}" if owner else ""))
        console.print(Padding(Text(inspect.getdoc(stage) or "(no docstring)"), (0, 0, 0, 2)))
        _print_rows(console, parameters(stage))
        for title, text in facts(stage):
            console.print(Padding(Text.assemble((f"{title}: ", "italic"), text), (0, 0, 0, 2)))
    if size is not None:
        console.print()
        _print_estimate(console, size)


def parameters(section: BaseModel) -> list[tuple[str, str, str, str]]:
    """Of each field: name and value, default, range, and description with its unit."""
    rows = []
    schema: dict[str, Any] = type(section).model_json_schema()["properties"]
    for name, info in type(section).model_fields.items():
        if name == "name":
            continue
        value = getattr(section, name)
        default = "required" if info.is_required() else f"default {_shown(info.default)}"
        rows.append((f"{name}: {_shown(value)}", default, value_range(schema[name]), info.description or ""))
    return rows


def value_range(schema: dict[str, Any]) -> str:
    """The values that a field takes, such as ">= 1" or "average | max"."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    found = []
    for option in options:
        if "enum" in option or "const" in option:
            found.append(" | ".join(map(str, option.get("enum", [option.get("const")]))))
        elif bounds := [f"{sign} {option[key]:g}" for key, sign in BOUNDS.items() if key in option]:
            found.append(", ".join(bounds))
        elif option.get("type") == "boolean":
            found.append("true | false")
    return " or ".join(found)


def facts(stage: Stage) -> list[tuple[str, str]]:
    """What a stage needs, its flags and its source."""
    found = [("needs", needs_text(stage.needs))]
    if isinstance(stage, Allocator):
        flags = {
            "heads of a layer may keep different entries": not stage.agrees,
            "entries may stand for several tokens": stage.merges,
            "runs again on blocks while decoding": stage.streams,
            "keeps every token": stage.keeps_all,
            "chooses among the encoder's grades": stage.chooses_grades,
        }
        found.append(("flags", "; ".join(f"{text}: {'yes' if flag else 'no'}" for text, flag in flags.items())))
    if isinstance(stage, Encoder):
        heads = {0: "all heads of a layer", 1: "each head by itself"}.get(
            stage.joins_heads, f"{stage.joins_heads} heads"
        )
        rows = "row by row" if stage.block == 1 else f"{stage.block} rows together"
        held = "held" if stage.uses_positions else "not held"
        if isinstance(stage, UnbiasedEncoder):
            held += ", unless the model's keys have a bias"
        found.append(("flags", f"codes {heads}, {rows}; positions of entries are {held}"))
    if stage.paper:
        found.append(("source", stage.paper))
    return found


def needs_text(needs: Needs) -> str:
    """Needs in words."""

    def amount(count: Any) -> str:
        return "all tokens" if count == "all" else "the last token" if count == 1 else f"the last {count} tokens"

    words = ["keys and values"]
    words += [f"queries of {amount(needs.queries)}"] if needs.queries else []
    words += [f"head outputs of {amount(needs.head_outputs)}"] if needs.head_outputs else []
    if needs.hidden_states:
        words.append(f"hidden states at depth {', '.join(f'{depth:g}' for depth in needs.hidden_states)}")
    words += ["surprisal"] if needs.surprisal else []
    return ", ".join(words)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_rows(console: Console, rows: list[tuple[str, str, str, str]]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table.grid(padding=(0, 2))
    for index in range(4):
        table.add_column(no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(Padding(table, (0, 0, 0, 2)))


def _print_estimate(console: Console, size: Estimate) -> None:
    from rich.table import Table

    table = Table("region", "tokens", "entries a head", "bytes", box=None, header_style="bold", pad_edge=False)
    for region in size.regions:
        table.add_row(region.name, str(region.tokens), f"{region.entries:.1f}", size_text(region.bytes))
    tokens, entries = sum(r.tokens for r in size.regions), sum(r.entries for r in size.regions)
    table.add_row("all", str(tokens), f"{entries:.1f}", size_text(size.bytes), style="bold")
    table.add_row("full cache", str(tokens), str(tokens), size_text(size.full_bytes))
    console.print(table)
    console.print(
        f"Ratio {tokens / entries:.2f} in entries, {size.full_bytes / size.bytes:.2f} in bytes, for one sequence, from "
        "declared sizes; the body's is an upper bound, buffers and offsets come on top. cache.report() measures."
    )
    if size.short:
        console.print(
            "The budget is less than what is protected takes; that is kept all the same, and nothing else "
            "(budget.strict: true makes it an error)."
        )
    if size.graded:
        console.print("The body's entries are counted in the dearest grade; in cheaper ones the same bytes hold more.")
