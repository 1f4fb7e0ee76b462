"""The table of a comparison: rows are pipelines, columns what was measured. Rendered for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvframe.eval.compare import FULL, Comparison
from kvframe.eval.results import Record
from kvframe.hf.remarks import NOTHING_DONE, TOO_SHORT

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"


@dataclass(frozen=True)
class Rows:
    """A table as text: names of columns, cells by row, and what the columns mean."""

    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    legend: tuple[str, ...]


def rows_of(comparison: Comparison) -> Rows:
    """The table of a comparison; a pipeline that failed has the measurements made before."""
    tasks = comparison.settings.tasks
    asked = [task for task in tasks if any("hit" in r for r in comparison.records if r["task"] == task)]
    texts = [task for task in tasks if task not in asked]
    columns = [("spec", None), ("budget", None)]
    cells: list[Callable[[list[Record]], str]] = []

    def column(name: str, cell: Callable[[list[Record]], str]) -> None:
        columns.append((name, None))
        cells.append(cell)

    for task in asked:
        column(task, lambda rs, task=task: _hits(r for r in rs if r["task"] == task))  # type: ignore[misc]
    if asked:
        column("KL answer", lambda rs: _mean(rs, "kl", asked, "{:.3f}", compressed=True))
    if texts:
        column("KL text", lambda rs: _mean(rs, "kl", texts, "{:.4f}", compressed=True))
        column("top-1 %", lambda rs: _mean(rs, "top1", texts, "{:.1f}", 100, compressed=True))
        column("NLL", lambda rs: _mean(rs, "nll", texts, "{:.3f}"))
    column("entries", lambda rs: _mean(rs, "entry_ratio", tasks, "{:.2f}x"))
    column("bytes", lambda rs: _mean(rs, "byte_ratio", tasks, "{:.2f}x"))
    column("compress %", lambda rs: _median(rs, lambda r: 100 * r["compress_ms"] / r["prefill_ms"], "{:.1f}"))
    column("decode ms", lambda rs: _median(rs, lambda r: r["decode_ms"], "{:.1f}"))
    column("vs full", lambda rs: _median(rs, lambda r: r["decode_ms"] / r["full_decode_ms"], "{:.2f}"))
    groups = [("full cache", "all", FULL), *((c.label, c.budget, c.fingerprint) for c in comparison.contenders)]
    table = []
    for label, budget, fingerprint in groups:
        records = comparison.of(fingerprint)
        name = f"{label} (failed)" if fingerprint in comparison.failures else label
        table.append((name, budget, *(cell(records) for cell in cells)))
    return Rows(tuple(name for name, _ in columns), tuple(table), _legend(asked, texts))


def _hits(records: Iterable[Record]) -> str:
    found = [bool(record["hit"]) for record in records]
    return f"{sum(found)}/{len(found)}" if found else NOTHING


def _mean(
    records: Sequence[Record], key: str, tasks: Sequence[str], form: str, factor: float = 1, compressed: bool = False
) -> str:
    values = [
        factor * record[key]
        for record in records
        if record["task"] in tasks and not (compressed and record["fingerprint"] == FULL)
    ]
    return form.format(fmean(values)) if values else NOTHING


def _median(records: Sequence[Record], value: Callable[[Record], float], form: str) -> str:
    values = []
    for record in records:
        try:
            values.append(value(record))
        except KeyError:  # the full cache neither compresses nor has itself beside it
            continue
    return form.format(median(values)) if values else NOTHING


def _legend(asked: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    lines = []
    if asked:
        lines.append(f"{', '.join(asked)}: answers found / asked, generated greedily.")
        lines.append("KL answer: KL(full cache || compressed) in nats a token, over the full cache's own answers.")
    if texts:
        lines.append(
            "KL text, top-1, NLL: the same divergence, the share of equal most likely tokens and -log p in nats, "
            "over the text's next tokens."
        )
    lines.append(
        "entries, bytes: context entries / kept ones (question and template on neither side); bytes of the full "
        "cache / bytes held, all tokens included. Means."
    )
    lines.append(
        "compress: milliseconds of compressing / of the stock cache's prefill of the same prompt; decode: milliseconds "
        "of a single-token step, and divided by the full cache's, both taken in turn. Medians over examples."
    )
    return tuple(lines)


def _two_lines(name: str) -> str:
    """A column's name broken at its space: the numbers are narrower than their names."""
    return name.replace(" ", "\n", 1)


def header_of(comparison: Comparison) -> str:
    """One line that says what was run."""
    settings = comparison.settings
    first: dict[str, Any] = dict(comparison.records[0]) if comparison.records else {}
    machine = f", {first['dtype']} on {first['device']}, {first['threads']} threads" if first else ""
    when = "before the question is seen" if settings.agnostic else "with the question in sight"
    return (
        f"{settings.model}{machine}; prompts of {settings.tokens} tokens, {settings.limit} a task, seed "
        f"{settings.seed}; {settings.mode}: compressed {when}"
    )


def failure_lines(comparison: Comparison) -> list[str]:
    """One sentence for each pipeline that failed."""
    names = {c.fingerprint: f"{c.label} {c.budget}" for c in comparison.contenders}
    return [f"{names[fingerprint]} failed: {why}" for fingerprint, why in comparison.failures.items()]


def short_lines(comparison: Comparison) -> list[str]:
    """One sentence for each pipeline for whose budget prompts were too short."""
    lines = []
    for contender in comparison.contenders:
        notes = [record.get("notes", []) for record in comparison.of(contender.fingerprint)]
        short = sum(any(TOO_SHORT in note or NOTHING_DONE in note for note in some) for some in notes)
        # Nothing was asked for at ratio 1.
        if short and contender.pipeline.spec.budget.ratio != 1:
            lines.append(
                f"{contender.label} {contender.budget}: {short} of {len(notes)} prompts were too short for the budget, "
                "so more is kept of them than was asked for."
            )
    return lines


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the table; on a terminal that is too narrow it is as wide as its numbers need."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows = rows_of(comparison)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows.columns:
        table.add_column(_two_lines(name), justify="left" if name == "spec" else "right", no_wrap=True)
    for cells in rows.cells:
        table.add_row(*(Text(cell) for cell in cells))
    console.print(Text(header_of(comparison), style="bold"))
    # Measured without a limit: a cut-off number would be a wrong one.
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width
    for line in rows.legend:
        console.print(Text(line, style="dim"))
    for line in (*short_lines(comparison), *failure_lines(comparison)):
        console.print(Text(line, style="red"))


def markdown(comparison: Comparison) -> str:
    """The table as Markdown, with what was run and what the columns mean."""
    rows = rows_of(comparison)
    align = ["---" if name == "spec" else "---:" for name in rows.columns]
    lines = ["# Comparison", "", f"{header_of(comparison)}.", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (rows.columns, align, *rows.cells)]
    lines += ["", *(f"- {line}" for line in (*rows.legend, *short_lines(comparison)))]
    if failures := failure_lines(comparison):
        lines += ["", "## Failed", "", *(f"- {line}" for line in failures)]
    versions = comparison.records[0]["versions"] if comparison.records else {}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += ["", f"Text {comparison.text}; {named}. One line a measurement: `results.jsonl`."]
    return "\n".join(lines) + "\n"
