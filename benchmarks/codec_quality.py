"""Quality of encoders at a number of bits: KL to the full cache on continued text, top-1 agreement, and needles, for
any list of specs with values set in them.

    python benchmarks/codec_quality.py --text BOOK.txt --limit 12 --bits 4,3,2.5,2 --run aatc --run aatc-paper
    python benchmarks/codec_quality.py --text BOOK.txt --run "aatc encoder.key_shift=0" --run "kivi encoder.bits=2"

A run is a spec's name and what is set in it. `--bits` makes one row for each number of bits from every run whose
encoder has `key_bits` and `value_bits` (unless the run sets them). Each prompt is read once; the exact cache and every
compressed one then predict the same tokens, fed in one piece: the text's next 64, or the full cache's own greedy answer
about a needle. A needle that the full cache finds is found again if every token of its answer, up to the needle's end,
is what the compressed cache finds most likely. Bits a value are what the encoder declares, scales and positions
included (the conformance kit holds that against the bytes held); errors are standard errors over the examples' means.
Times are not measured. What `--out` holds of a run with the same text, model, prompts and seed is taken from there."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import yaml

import kvframe
from kvframe.eval.fidelity import kl_divergence, top1_agreement
from kvframe.eval.tasks import Example, Source, make_tasks
from kvframe.eval.text import embedded_text, read_text
from kvframe.hf import Prefill, load_model, model_info


def pipelines(runs: list[str], bits: list[float]) -> dict[str, kvframe.Pipeline]:
    """One pipeline for each run and number of bits, by the label it is shown with."""
    made = {}
    for run in runs:
        name, *settings = run.split()
        overrides = {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}
        encoder = kvframe.load(name, overrides).spec.encoder
        if bits and hasattr(encoder, "key_bits") and not any("_bits" in key for key in overrides):
            for width in bits:
                both = {"encoder.key_bits": width, "encoder.value_bits": width}
                made[f"{run} @{width:g}"] = kvframe.load(name, {**overrides, **both})
        else:
            made[run] = kvframe.load(name, overrides)
    return made


def feed(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """The logits `[Q, V]` of all fed tokens."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits[0].float()


def answer_of(model: Any, tokenizer: Any, prefill: Prefill, example: Example) -> list[int]:
    """The full cache's own greedy answer."""
    cache, token, found = prefill.fork(), example.prompt.ids[-1], []
    while len(found) < example.new_tokens:
        token = int(feed(model, cache, [token])[-1].argmax())
        if token == tokenizer.eos_token_id:
            break
        found.append(token)
    return found


def needle_end(tokenizer: Any, answer: str, ids: list[int]) -> int:
    """The number of tokens at which the answer's text is complete; 0 if it never is."""
    return next((n for n in range(1, len(ids) + 1) if answer in tokenizer.decode(ids[:n])), 0)


def measure(model: Any, tokenizer: Any, example: Example, listed: dict[str, Any], seen: dict[str, list[Any]]) -> None:
    """Add one example's figures to `seen`, by label."""
    prompt = example.prompt
    prefill = Prefill(model, listed.values())
    with torch.no_grad():
        model(torch.tensor([prompt.ids[:-1]]), cache=prefill, use_cache=True, logits_to_keep=1)
    targets = list(example.targets) or answer_of(model, tokenizer, prefill, example)
    fed = [prompt.ids[-1], *targets[:-1]]
    reference = feed(model, prefill.fork(), fed)
    end = needle_end(tokenizer, example.answer, targets) if example.answer else 0
    for label, pipeline in listed.items():
        cache = prefill.fork(pipeline, prompt.prefix_length, prompt.suffix_length - 1)
        cache.compress()
        held = cache.report()
        logits = feed(model, cache, fed)
        same = top1_agreement(reference, logits)
        record = {"kl": float(kl_divergence(reference, logits).mean()), "top1": float(same.float().mean())}
        record |= {"byte_ratio": held.byte_ratio, "compress_seconds": held.compress_seconds}
        if example.answer:
            record |= {"full_finds_it": end > 0, "hit": end > 0 and bool(same[:end].all())}
        seen[label].append({"task": example.task, "index": example.index, **record})


def rows(listed: dict[str, Any], seen: dict[str, list[Any]], info: Any) -> list[dict[str, Any]]:
    """What is printed: one row a pipeline."""
    found = []
    for label, pipeline in listed.items():
        text = [r for r in seen[label] if r["task"] == "continuation"]
        asked = [r for r in seen[label] if r.get("full_finds_it")]
        kl = [r["kl"] for r in text]
        found.append(
            {
                "run": label,
                "bits": pipeline.spec.encoder.bits_per_entry(info, 2) / (2 * info.head_dim),
                "kl": fmean(kl) if kl else None,
                "kl_error": stdev(kl) / len(kl) ** 0.5 if len(kl) > 1 else None,
                "kl_median": median(kl) if kl else None,
                "top1": 100 * fmean(r["top1"] for r in text) if text else None,
                "needles": f"{sum(r['hit'] for r in asked)}/{len(asked)}" if asked else "-",
                "needle_kl": fmean(r["kl"] for r in asked) if asked else None,
            }
        )
    return found


COLUMNS = {
    "bits": ("bits a value", ".3f"),
    "kl": ("KL", ".4f"),
    "kl_error": ("+-", ".4f"),
    "kl_median": ("median", ".4f"),
    "top1": ("top-1 %", ".1f"),
    "needles": ("needles", ""),
    "needle_kl": ("their KL", ".4f"),
}


def show(table: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""
    print(f"| run | {' | '.join(title for title, _ in COLUMNS.values())} |")
    print("|" + "---|" * (len(COLUMNS) + 1))
    for row in table:
        cells = ("-" if row[key] is None else format(row[key], form) for key, (_, form) in COLUMNS.items())
        print(f"| {row['run']} | {' | '.join(cells)} |")


def resumed(written: Path, settings: dict[str, Any]) -> dict[str, list[Any]]:
    """The records by label of an earlier run with the same settings; none if there was no such run."""
    found: dict[str, list[Any]] = defaultdict(list)
    if written.exists():
        earlier = json.loads(written.read_text())
        if earlier["settings"] != settings:
            raise SystemExit(f"{written} holds a run with other settings, {earlier['settings']}; give another --out.")
        found.update(earlier["records"])
    return found


def has(records: list[dict[str, Any]], task: str, index: int) -> bool:
    """Whether an example was measured."""
    return any(r["task"] == task and r["index"] == index for r in records)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="a spec and what is set in it")
    parser.add_argument("--bits", default="", help="numbers of bits, separated by commas")
    parser.add_argument("--text", type=Path, help="text of the contexts; default: the Python language reference")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="continuation")
    parser.add_argument("--tokens", type=int, default=960, help="tokens of a prompt; the last is fed uncompressed")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/codec_quality"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model)
    listed = pipelines(args.run, [float(b) for b in args.bits.split(",") if b])
    text = embedded_text() if args.text is None else read_text(args.text)
    tasks = make_tasks(args.tasks.split(","), Source(tokenizer, text, args.tokens, args.seed))
    args.out.mkdir(parents=True, exist_ok=True)
    written = args.out / "codec_quality.json"
    settings = {
        "model": model_info(model).fingerprint,
        "text": hashlib.sha256(text.encode()).hexdigest()[:12],
        "tokens": args.tokens,
        "seed": args.seed,
    }
    seen = resumed(written, settings)
    for task, index in ((task, index) for task in tasks for index in range(args.limit)):
        left = {name: pipeline for name, pipeline in listed.items() if not has(seen[name], task.name, index)}
        if left:
            measure(model, tokenizer, task.example(index), left, seen)
            written.write_text(json.dumps({"settings": settings, "records": seen}, indent=1))
            print(f"{task.name} {index + 1}/{args.limit}", flush=True)
    names = {task.name for task in tasks}
    wanted = {name: [r for r in seen[name] if r["task"] in names and r["index"] < args.limit] for name in listed}
    show(rows(listed, wanted, model_info(model)))
    print(f"\n{args.limit} examples of {args.tokens} tokens a task, seed {args.seed}, {platform.machine()}, fp32")


if __name__ == "__main__":
    main()
