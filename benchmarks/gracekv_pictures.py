"""Pictures of what GraceKV decides on one prompt: slots over the text with their boundary scores, and where the budget
went over layers and heads.

    python benchmarks/gracekv_pictures.py --text book.txt --tokens 600 --ratio 8 --out docs/methods/img

Needs matplotlib."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

mpl.use("svg")
import matplotlib.pyplot as plt

import kvframe
from kvframe.budget import entry_budget, split_regions
from kvframe.hf import load_model

mpl.rcParams["svg.hashsalt"] = "kvframe"


def observed(model: Any, ids: torch.Tensor, spec: str, ratio: float) -> tuple[Any, Any, torch.Tensor]:
    """The pipeline, what it observes of the prompt, and the budget."""
    pipeline = kvframe.load(spec, {"budget.ratio": ratio})
    cache = pipeline.cache(model)
    model(ids, cache=cache, logits_to_keep=1)
    regions = split_regions(cache.valid, pipeline.spec.protect)
    observation = cache.observe(regions, pipeline.needs)
    budget, _ = entry_budget(pipeline.spec.budget, regions, cache.info, 4, 1)
    return pipeline, observation, budget


def draw_slots(model: Any, tokenizer: Any, ids: torch.Tensor, path: Path) -> None:
    """Boundary scores along the text, the cuts, and the words after the strongest of them."""
    pipeline, seen, _ = observed(model, ids, "gracekv-paper", 4)
    segments = pipeline.spec.segmenter.segment(seen)
    strength, cuts = segments.boundary[0], segments.ids[0].diff().nonzero()[:, 0] + 1
    figure, axis = plt.subplots(figsize=(11, 3.4), constrained_layout=True)
    axis.plot(strength, color="0.6", linewidth=0.8)
    axis.scatter(cuts, strength[cuts], s=14, color="tab:red", zorder=3, label="first token of a slot")
    for index, (begin, end) in enumerate(zip([0, *cuts.tolist()], [*cuts.tolist(), len(strength)], strict=True)):
        axis.axvspan(begin, end, color="tab:blue", alpha=0.04 + 0.08 * (index % 2), linewidth=0)
    for cut in cuts[strength[cuts].argsort(descending=True)[:12]].tolist():
        words = tokenizer.decode(ids[0, cut : cut + 3]).replace("\n", " ").replace("$", " ").strip()
        axis.annotate(
            words, (cut, float(strength[cut])), rotation=60, fontsize=7, xytext=(2, 4), textcoords="offset points"
        )
    axis.set_ylim(-4, float(strength.max()) * 1.6)
    axis.set_xlabel("token")
    axis.set_ylabel("strength of the cut before it")
    axis.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def draw_budget(model: Any, ids: torch.Tensor, ratio: float, path: Path) -> None:
    """Entries of every head, and how many tokens an entry stands for, for both specs."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 5), constrained_layout=True)
    for line, spec in zip(axes, ("gracekv-paper", "gracekv"), strict=True):
        pipeline, seen, budget = observed(model, ids, spec, ratio)
        plan = pipeline.plan(seen, budget)
        counts = torch.stack([layer.n_entries[0] for layer in plan.layers])  # [L, H]
        kept = torch.stack([(layer.assignment[0] >= 0).sum(-1) for layer in plan.layers])
        image = line[0].imshow(counts.T, aspect="auto")
        figure.colorbar(image, ax=line[0])
        line[0].set_title(f"{spec}: entries of each head")
        image = line[1].imshow((kept / counts.clamp_min(1)).T, aspect="auto", vmin=1)
        figure.colorbar(image, ax=line[1])
        line[1].set_title("tokens an entry stands for")
        for axis in line[:2]:
            axis.set_xlabel("layer")
            axis.set_ylabel("KV head")
            axis.set_yticks(range(counts.shape[1]))
        sizes = torch.cat([sizes_of(layer) for layer in plan.layers])
        edges = [1, 2, 3, 5, 9, 17, 33, 65, 129]
        names = ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128"]
        share = [float(((sizes >= a) & (sizes < b)).sum()) / len(sizes) for a, b in pairwise(edges)]
        line[2].bar(names, [100 * s for s in share])
        line[2].set_title("entries by size")
        line[2].set_xlabel("tokens in the entry")
        line[2].set_ylabel("% of entries")
        line[2].tick_params(axis="x", labelsize=7, rotation=30)
    figure.savefig(path, metadata={"Date": None})


def sizes_of(layer: Any) -> torch.Tensor:
    """Tokens of every entry of a layer's plan."""
    assignment = layer.assignment[0].long()
    offsets = layer.n_entries[0].cumsum(0) - layer.n_entries[0]
    at = torch.where(assignment >= 0, assignment + offsets[:, None], -1)
    return torch.bincount(at[at >= 0])


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--start", type=int, default=5000, help="first token of the text that is used")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path("docs/methods/img"))
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(options.model)
    ids = tokenizer(options.text.read_text(), return_tensors="pt", verbose=False).input_ids
    ids = ids[:, options.start : options.start + options.tokens]
    options.out.mkdir(parents=True, exist_ok=True)
    draw_slots(model, tokenizer, ids, options.out / "gracekv_slots.svg")
    draw_budget(model, ids, options.ratio, options.out / "gracekv_budget.svg")


if __name__ == "__main__":
    main()
