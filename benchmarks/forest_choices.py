"""What the forest's parameters are worth: the KL of 64 tokens of text after 960, beside the methods it combines.

    python benchmarks/forest_choices.py --text FILE                                  # the defaults, changed one by one
    python benchmarks/forest_choices.py --text FILE --variants "drop=3;base=0.5"     # others; `;` within, `,` between

Each example is read once for all variants. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import kvframe
from kvframe.eval.fidelity import kl_divergence, top1_agreement
from kvframe.hf import Prefill, load_model

STARTS = (11000, 33000, 52000, 71000, 90000)
OTHERS = ("centroidkv", "gracekv", "snapkv")
PROTECT = {"protect.recent_min": 4, "protect.recent_share": 0.25}
CHANGES = "drop=1,chunk=256,base=0.1,base=1,value_share=2,passes=0,scorer.pool_width=5"
NEW = 64


def overrides(variant: str) -> dict[str, float]:
    """ "drop=3;scorer.pool_width=5" as overrides; a bare name is the allocator's."""
    pairs = (item.split("=") for item in variant.split(";") if item)
    return {name if "." in name else f"allocator.{name}": json.loads(value) for name, value in pairs}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=960)
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--ratios", default="2,4,16")
    parser.add_argument("--variants", default=CHANGES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(args.model)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids
    specs = {name: (name, {}) for name in OTHERS} | {"forest": ("forest", {})}
    specs |= {variant: ("forest", overrides(variant)) for variant in args.variants.split(",") if variant}
    ratios = [float(ratio) for ratio in args.ratios.split(",")]
    pipelines = {
        (ratio, name): kvframe.load(spec, {**changes, **PROTECT, "budget.ratio": ratio})
        for ratio in ratios
        for name, (spec, changes) in specs.items()
    }
    rows: dict[tuple[float, str], list[tuple[float, float, float]]] = {key: [] for key in pipelines}
    for start in STARTS[: args.examples]:
        text = ids[:, start : start + args.tokens + NEW]
        seen, answer = text[:, : args.tokens - 1], text[:, args.tokens - 1 : -1]
        prefill = Prefill(model, pipelines.values())
        model(seen, cache=prefill, logits_to_keep=1)
        wanted = model(answer, cache=prefill.fork()).logits[0].float()
        for key, pipeline in pipelines.items():
            cache = prefill.fork(pipeline)
            begin = time.process_time()
            cache.compress()
            seconds = time.process_time() - begin
            got = model(answer, cache=cache).logits[0].float()
            kl, top1 = kl_divergence(wanted, got).mean(), top1_agreement(wanted, got).float().mean()
            rows[key].append((float(kl), float(top1), seconds))
    result = {}
    for (ratio, name), values in rows.items():
        kl, top1 = (sum(value[i] for value in values) / len(values) for i in (0, 1))
        print(f"{ratio:5g}x {name:32} KL {kl:.4f}  top-1 {top1:.3f}  {min(v[2] for v in values) * 1000:.0f} ms")
        result[f"{name} {ratio:g}x"] = round(kl, 4)
    print(json.dumps({"tokens": args.tokens, "examples": args.examples, "kl": result}))


if __name__ == "__main__":
    main()
