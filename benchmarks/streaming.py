"""A long answer under compression: negative log-likelihood and bytes held while a text goes on.

    python benchmarks/streaming.py --text FILE --specs gracekv,h2o,snapkv,streamingllm --ratio 8 --new 4096

The model is shown a prompt and then the text's next tokens, a block at a time; between two blocks the tokens that left
the recent window are compressed by the spec's stages, with the queries seen last as probes, as `decode.flush` does it
for generated tokens. All specs see the same tokens, after one another, in one process. NLL is in nats a token; "bytes
held" is the largest share of the full cache's bytes after any compression from the first thousand tokens on."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

import kvframe
from kvframe.eval.text import embedded_text
from kvframe.hf import load_model

SETTLED = 1000


def run(model: torch.nn.Module, ids: Tensor, prompt: int, block: int, spec: str, ratio: float) -> dict[str, float]:
    """Nats a token of what follows the prompt `ids [1, T]`, and the largest share of bytes held."""
    if spec == "full":
        cache = DynamicCache(config=model.config)
    else:
        cache = kvframe.load(spec, {"budget.ratio": ratio, "prefill.flush": block}).cache(model)
    total, share, entries = 0.0, 0.0, 1.0
    cuts = [0, prompt, *range(prompt + block, ids.shape[1], block), ids.shape[1]]
    last = None
    for begin, end in pairwise(cuts):
        logits = model(ids[:, begin:end], cache=cache).logits.float()
        if begin:
            before = logits[:, :-1] if last is None else torch.cat([last, logits[:, :-1]], 1)
            total += float(torch.nn.functional.cross_entropy(before[0], ids[0, begin:end], reduction="sum"))
        last = logits[:, -1:]
        if spec != "full":
            cache.compress_waiting(block)
            report = cache.report()
            if end >= SETTLED:
                share, entries = max(share, report.bytes / report.full_bytes), report.entry_ratio
    return {"nll": total / (ids.shape[1] - prompt), "share": share or 1.0, "ratio": entries}


def main() -> None:
    """Run each spec on the same tokens; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="gracekv,h2o,snapkv,streamingllm")
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=4096)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--start", type=int, default=2000, help="first token of the text")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each spec")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load_model("smollm2")
    text = embedded_text() if options.text is None else options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    ids = ids[:, options.start : options.start + options.prompt + options.new]
    print(f"{'spec':>16} {'NLL':>7} {'bytes held / full':>18} {'ratio':>7}")
    found = {}
    for spec in ("full", *options.specs.split(",")):
        found[spec] = run(model, ids, options.prompt, options.block, spec, options.ratio)
        print(
            f"{spec:>16} {found[spec]['nll']:7.4f} {found[spec]['share']:18.3f} {found[spec]['ratio']:7.2f}", flush=True
        )
        if options.out is not None:
            options.out.write_text(json.dumps({**vars(options), "found": found}, default=str, indent=1))


if __name__ == "__main__":
    main()
