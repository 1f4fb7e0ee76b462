"""Compression time as a share of the prefill, against context length.

    python benchmarks/compression.py run --contexts 1024 2048 4096 --out benchmarks/results/compression.json
    python benchmarks/compression.py show benchmarks/results/compression.json

A model of SmolLM2's shape with random weights reads a random prompt once for all specs (`kvframe.hf.Prefill`), so the
share is that of the time the observed prefill takes."""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from decode import SMOLLM2
from machine import save_figure, write_rows
from transformers import LlamaConfig, LlamaForCausalLM

import kvframe
from kvframe.hf import Prefill

RATIO = {"budget.ratio": 4}
SPECS: dict[str, tuple[str, dict[str, object]]] = {
    "snapkv": ("snapkv", RATIO),
    "h2o": ("h2o", RATIO),
    "centroidkv": ("centroidkv", RATIO),
    "gracekv": ("gracekv", RATIO),
    "aatc, fitted on the prompt": ("aatc", {"encoder.calibration": "prompt"}),
}


def measure(context: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    pipelines = {name: kvframe.load(spec, overrides) for name, (spec, overrides) in SPECS.items()}
    prefill = Prefill(model, pipelines.values())
    ids = torch.randint(0, SMOLLM2["vocab_size"], (1, context))
    begin = time.perf_counter()
    model(ids, cache=prefill, use_cache=True, logits_to_keep=1)
    read = time.perf_counter() - begin
    print(f"{context} tokens: prefill {read:.2f} s")
    rows = []
    for name, pipeline in pipelines.items():
        cache = prefill.fork(pipeline)
        gc.collect()
        begin = time.perf_counter()
        cache.compress()
        spent = time.perf_counter() - begin
        row = {"context": context, "spec": name, "prefill_s": round(read, 3), "compress_s": round(spent, 3)}
        rows.append(row | {"share": round(spent / read, 4)})
        print(f"  {name:28}{spent:8.2f} s {100 * spent / read:6.1f} %")
        del cache
    return rows


def run(args: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for context in args.contexts:
        known = [row for row in known if row["context"] != context] + measure(context)
        known.sort(key=lambda row: row["context"])
        write_rows(args.out, known)


def show(args: argparse.Namespace) -> None:
    """The table, and a plot beside the file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    data = json.loads(args.file.read_text())
    print(json.dumps(data["machine"]))
    print("| context | spec | prefill, s | compression, s | share |\n|---|---|---|---|---|")
    for row in data["rows"]:
        print(
            f"| {row['context']} | {row['spec']} | {row['prefill_s']:.2f} | {row['compress_s']:.2f} "
            f"| {row['share']:.1%} |"
        )
    figure, ax = plt.subplots(figsize=(5.5, 4))
    for name in SPECS:
        points = [(row["context"], 100 * row["share"]) for row in data["rows"] if row["spec"] == name]
        ax.plot(*zip(*points, strict=True), marker="o", ms=4, label=name)
    ticks = sorted({row["context"] for row in data["rows"]})
    ax.set(xscale="log", xlabel="tokens of context", ylabel="compression, % of the prefill", ylim=(0, None))
    ax.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.legend(loc="lower center", ncols=3, fontsize=8)
    save_figure(figure, args.file)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--contexts", type=int, nargs="+", required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.set_defaults(call=run)
    shows = commands.add_parser("show")
    shows.add_argument("file", type=Path)
    shows.set_defaults(call=show)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
