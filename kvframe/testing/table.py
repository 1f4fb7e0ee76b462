"""The laws as Markdown: `python -m kvframe.testing.table` prints what stands in docs/conformance.md."""

from __future__ import annotations

from kvframe.testing.checks import LAWS

TITLES = {
    "stage": "Every stage",
    "segmenter": "Segmenters",
    "scorer": "Scorers",
    "allocator": "Allocators",
    "encoder": "Encoders",
    "attention": "Attention kernels",
    "pipeline": "Specs, on a tiny random transformer",
}


def law_tables() -> str:
    """One table for each kind: the law's name and its sentence, which is its function's docstring."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += [f"### {title}", "", "| law | what holds |", "|---|---|"]
        lines += [f"| `{law.name}` | {law.text.replace('|', chr(92) + '|')} |" for law in LAWS[kind]]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(law_tables())
