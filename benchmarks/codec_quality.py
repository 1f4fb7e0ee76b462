"""Quality of encoders at a number of bits: KL to the full cache on continued text, top-1 agreement, and needles, for
any list of specs with values set in them. All are measured on the same examples, each prompt being read once for all.

    python benchmarks/codec_quality.py --text BOOK.txt --limit 12 --bits 4,3,2.5,2 --run aatc --run aatc-paper
    python benchmarks/codec_quality.py --text BOOK.txt --run "aatc encoder.key_shift=0" --run "kivi encoder.bits=2"

A run is a spec's name and what is set in it. `--bits` makes one row for each number of bits from every run whose
encoder has `key_bits` and `value_bits`. Bits a value are what the encoder declares, scales and positions included (the
conformance kit holds that against the bytes held); errors are standard errors over the examples' means."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import yaml

import kvframe
from kvframe.eval.compare import Comparison, Settings, compare, open_results
from kvframe.eval.contenders import Contender
from kvframe.eval.text import embedded_text, read_text
from kvframe.hf import load_model, model_info


def contenders(runs: list[str], bits: list[float]) -> list[Contender]:
    """One contender for each run and number of bits."""
    made = []
    for run in runs:
        name, *settings = run.split()
        overrides = {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}
        encoder = kvframe.load(name, overrides).spec.encoder
        if bits and hasattr(encoder, "key_bits") and not any("_bits" in key for key in overrides):
            for width in bits:
                both = {"encoder.key_bits": width, "encoder.value_bits": width}
                made.append(Contender(f"{run} @{width:g}", kvframe.load(name, {**overrides, **both})))
        else:
            made.append(Contender(run, kvframe.load(name, overrides)))
    return made


def rows(comparison: Comparison, info: Any) -> list[dict[str, Any]]:
    """What is printed: one row a contender."""
    found = []
    for contender in comparison.contenders:
        text = comparison.of(contender.fingerprint, "continuation")
        needles = [r for task in ("niah", "multikey", "words") for r in comparison.of(contender.fingerprint, task)]
        kl = [r["kl"] for r in text]
        spec = contender.pipeline.spec
        found.append(
            {
                "run": contender.label,
                "bits": spec.encoder.bits_per_entry(info, 2) / (2 * info.head_dim),
                "kl": fmean(kl) if kl else None,
                "kl_error": stdev(kl) / len(kl) ** 0.5 if len(kl) > 1 else None,
                "kl_median": median(kl) if kl else None,
                "top1": 100 * fmean(r["top1"] for r in text) if text else None,
                "needles": f"{sum(bool(r['hit']) for r in needles)}/{len(needles)}" if needles else "-",
                "needle_kl": fmean(r["kl"] for r in needles) if needles else None,
                "byte_ratio": fmean(r["byte_ratio"] for r in text) if text else None,
                "compress_percent": median(100 * r["compress_ms"] / r["prefill_ms"] for r in text) if text else None,
                "failed": comparison.failures.get(contender.fingerprint, ""),
            }
        )
    return found


def show(table: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print("| run | bits a value | KL | +- | median | top-1 % | needles | needle KL | bytes | compress % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in table:
        cells = (
            row["run"] + (f" FAILED: {row['failed']}" if row["failed"] else ""),
            number(row["bits"], ".3f"),
            number(row["kl"], ".4f"),
            number(row["kl_error"], ".4f"),
            number(row["kl_median"], ".4f"),
            number(row["top1"], ".1f"),
            row["needles"],
            number(row["needle_kl"], ".4f"),
            number(row["byte_ratio"], ".2f"),
            number(row["compress_percent"], ".1f"),
        )
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="a spec and what is set in it")
    parser.add_argument("--bits", default="", help="numbers of bits, separated by commas")
    parser.add_argument("--text", type=Path, help="text of the contexts; default: the Python language reference")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="continuation")
    parser.add_argument("--tokens", type=int, default=959)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/codec_quality"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model)
    bits = [float(b) for b in args.bits.split(",") if b]
    settings = Settings(args.model, tuple(args.tasks.split(",")), args.tokens, args.limit, args.seed)
    text = embedded_text() if args.text is None else read_text(args.text)
    listed = contenders(args.run, bits)

    def listen(done: int, total: int, what: str) -> None:
        print(f"\r{done}/{total} {what:70.70}", end="", flush=True)

    comparison = compare(model, tokenizer, listed, settings, text, open_results(args.out), listen)
    print("\r" + " " * 90 + "\r", end="")
    table = rows(comparison, model_info(model))
    show(table)
    (args.out / "codec_quality.json").write_text(json.dumps(table, indent=1))
    print(f"\n{args.limit} examples of {args.tokens} tokens a task, seed {args.seed}, {platform.machine()}, fp32")


if __name__ == "__main__":
    main()
