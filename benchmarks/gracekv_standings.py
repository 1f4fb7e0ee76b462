"""Where one spec stands among the others in the results of `kvframe compare`: paired per example.

    python benchmarks/gracekv_standings.py runs/compare --spec gracekv

For each task and ratio: mean and median KL to the full cache, hits, and the paired difference to the spec (mean and
standard error, and on how many examples the spec is lower). `first` = lower than every other by more than one standard
error of the difference, `tied` = none is lower by more than that, else `behind`."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev


def main() -> None:
    """Print the tables and the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--spec", default="gracekv")
    parser.add_argument("--without", default="", help="specs left out of the standings, separated by commas")
    options = parser.parse_args()
    cells: dict[tuple[str, str], dict[str, dict[int, dict]]] = defaultdict(lambda: defaultdict(dict))
    for folder in options.folder:
        for line in (folder / "results.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["spec"] != "full":
                cells[record["task"], record["budget"]][record["spec"]][record["example"]] = record
    out = set(options.without.split(","))
    count: dict[str, int] = defaultdict(int)
    for (task, budget), specs in sorted(cells.items()):
        own = specs[options.spec]
        print(
            f"\n{task} {budget}\n| spec | n | KL mean | median | hits | minus {options.spec} | {options.spec} lower |"
        )
        print("|---|---|---|---|---|---|---|")
        standing = "first"
        for name, found in sorted(specs.items(), key=lambda item: mean(r["kl"] for r in item[1].values())):
            values = [r["kl"] for r in found.values()]
            hits = [r["hit"] for r in found.values() if "hit" in r]
            both = sorted(set(own) & set(found))
            paired = [found[i]["kl"] - own[i]["kl"] for i in both]
            error = stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else 0.0
            shown = f"{mean(paired):+.3f} ± {error:.3f}" if name != options.spec else ""
            wins = f"{sum(p > 0 for p in paired)} of {len(paired)}" if name != options.spec else ""
            print(
                f"| {name} | {len(values)} | {mean(values):.3f} | {median(values):.3f} | "
                f"{f'{sum(hits)} of {len(hits)}' if hits else ''} | {shown} | {wins} |"
            )
            if name != options.spec and name not in out:
                if mean(paired) < -error:
                    standing = "behind"
                elif mean(paired) <= error and standing == "first":
                    standing = "tied"
        print(f"\n{options.spec} is {standing}")
        count[standing] += 1
    print("\n" + ", ".join(f"{name} in {number}" for name, number in count.items()), f"of {len(cells)} settings")


if __name__ == "__main__":
    main()
