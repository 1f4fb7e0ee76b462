"""The picture of how far caches are from the full one at the bytes that they hold, from results of `kvframe compare`.

    kvframe compare --specs gracekv+aatc,gracekv --ratios 8,16,32 --out runs/a
    python benchmarks/divergence_picture.py runs/a --task continuation --out divergence.svg

Folders may hold results of different specs on the same examples. The fixed budgets of one method may come as specs of
several names that end in a number (`aatc8`, `aatc16`): they are drawn as one line. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

STYLES = ("-", "--", ":")


def curves(folders: list[Path], task: str) -> dict[str, list[tuple[float, float]]]:
    """For each spec `(bytes of the full cache / bytes held, mean KL in nats)`, by falling bytes."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for folder in folders:
        for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["task"] == task and record["spec"] != "full":
                found[record["spec"], record["fingerprint"]].append((record["byte_ratio"], record["kl"]))
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (spec, _), points in found.items():
        lines[spec.rstrip("0123456789")].append((mean(p[0] for p in points), mean(p[1] for p in points)))
    return {spec: sorted(points) for spec, points in lines.items()}


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--task", default="continuation")
    parser.add_argument("--out", type=Path, default=Path("divergence.svg"))
    args = parser.parse_args()
    lines = curves(args.folders, args.task)
    if not lines:
        raise SystemExit(f"There is no result of the task '{args.task}' in {', '.join(map(str, args.folders))}.")
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    ordered = sorted(lines.items(), key=lambda item: -item[1][-1][1])
    for index, (spec, points) in enumerate(ordered):
        style = STYLES[0 if "+" in spec else 1 if spec == "aatc" else 2]
        axis.plot(*zip(*points, strict=True), style, marker="o", color=f"C{index % 10}", label=spec)
    axis.set(xscale="log", yscale="log", xlabel="bytes of the full cache / bytes held (measured)")
    axis.set(ylabel="KL(full cache ‖ compressed), nats a token")
    ticks = sorted({round(x) for points in lines.values() for x, _ in points if round(x) in (2, 4, 8, 16, 32, 64)})
    axis.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
