"""Where GraceKV stands among the baselines: the paper's table, repeated on a small model, paired per example.

    python benchmarks/gracekv_standings.py run --text book.txt --out runs/standings --minutes 10    # until all is there
    python benchmarks/gracekv_standings.py show runs/standings --without gracekv-paper

`run` reads each prompt once. The full cache's own greedy answer (or the text that follows) is then teacher-forced
through every compressed cache in one call. It goes on where it stopped. All specs but
`gracekv-paper` protect the same tokens: 4 sinks and 32 recent ones, or a quarter of the budget once that is below 1.5
windows.

`show` prints for each task and ratio: mean and median KL to the full cache in nats, how many answers the compressed
cache repeats to the token (of those that the full cache gives correctly), and the paired difference to the spec (mean
and standard error, and on how many examples the spec is lower). `first` = lower than every other by more than one
standard error of the difference, `tied` = none is lower by more than that, else `behind`."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from kvframe.eval import Example, Source, kl_divergence, make_tasks
from kvframe.eval.measure import Runner, observe
from kvframe.hf import Prefill, load_model
from kvframe.pipeline import Pipeline, load
from kvframe.specfile import spec_source
from kvframe.types import Observation, Segments
from kvframe_baselines import H2O

BASELINES = "h2o,streamingllm,snapkv,pyramidkv,adakv,chunkkv,cam,d2o,globalkv"
TASKS = "words,continuation,niah,multikey"
RATIOS = "4,8,16,32,64"
# (task, ratio) -> spec -> (seed, example) -> record
Cells = dict[tuple[str, int], dict[str, dict[tuple[int, int], dict[str, Any]]]]
PROTECT = {"sink": 4, "recent": 32, "recent_min": 4, "recent_share": 0.25}


def pipelines(specs: str, ratios: str) -> dict[tuple[str, str], Pipeline]:
    """(spec, ratio) -> pipeline."""
    found = {}
    for spec in specs.split(","):
        same = {} if "paper" in spec else {f"protect.{name}": value for name, value in PROTECT.items()}
        for ratio in ratios.split(","):
            found[spec, f"{ratio}x"] = load(spec_source(spec), {"budget.ratio": float(ratio), **same})
    return found


@dataclass(frozen=True, eq=False)
class Reference:
    """The tokens that are scored, the full cache's logits for them `[T, V]`, and whether it answers correctly."""

    answer: tuple[int, ...]
    logits: torch.Tensor
    correct: bool | None


def full_cache(runner: Runner, example: Example, observed: Prefill) -> Reference:
    """What the cache without compression does on an example."""
    cache, answer, fed = observed.fork(), list(example.targets), example.prompt.ids[-1]
    if answer:
        return Reference(tuple(answer), runner.step(cache, [fed, *answer[:-1]]).float(), None)
    rows = []
    while len(answer) < example.new_tokens:
        rows.append(runner.step(cache, [fed]))
        fed = int(rows[-1].argmax())
        answer.append(fed)
        if fed in runner.stop_ids:
            break
    correct = example.answer.lower() in runner.text(answer).lower()
    return Reference(tuple(answer), torch.cat(rows).float(), correct)


def one(runner: Runner, example: Example, reference: Reference, observed: Prefill, pipeline: Pipeline) -> Any:
    """What one pipeline did on one example."""
    prompt = example.prompt
    cache = observed.fork(pipeline, prompt.prefix_length, prompt.suffix_length - 1)
    begin = time.process_time()
    cache.compress()
    spent = time.process_time() - begin
    rows = runner.step(cache, [prompt.ids[-1], *reference.answer[:-1]]).float()
    same = rows.argmax(-1) == reference.logits.argmax(-1)
    report = cache.report()
    return {
        "kl": float(kl_divergence(reference.logits, rows).mean()),
        "top1": float(same.float().mean()),
        "same_answer": bool(same.all()),
        "entry_ratio": report.entry_ratio,
        "byte_ratio": report.byte_ratio,
        "compress_s": spent,
    }


class Remembered:
    """H2O's scores, which take longest, are the same at every ratio: made once an example."""

    def __init__(self) -> None:
        self.scores: dict[H2O, torch.Tensor] = {}
        original = H2O.score

        def score(scorer: H2O, observation: Observation, segments: Segments) -> torch.Tensor:
            if scorer not in self.scores:
                self.scores[scorer] = original(scorer, observation, segments)
            return self.scores[scorer]

        H2O.score = score  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, for so many minutes."""
    stop = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    path: Path = options.out / "results.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {(r["task"], r["example"], r["fingerprint"], r["seed"]) for r in map(json.loads, lines)}
    wanted = pipelines(options.specs, options.ratios)
    runner, remembered = Runner(*load_model(options.model)), Remembered()
    source = Source(runner.tokenizer, options.text.read_text(), options.tokens, options.seed)
    tasks = make_tasks(tuple(options.tasks.split(",")), source)
    with path.open("a") as file:
        for task in tasks:
            for index in range(options.limit):
                missing = {
                    key: pipeline
                    for key, pipeline in wanted.items()
                    if (task.name, index, pipeline.spec.fingerprint, options.seed) not in done
                }
                if not missing:
                    continue
                if time.monotonic() > stop:
                    return
                example = task.example(index)
                observed, _ = observe(runner, example, missing.values())
                remembered.scores.clear()
                reference = full_cache(runner, example, observed)
                for (spec, budget), pipeline in missing.items():
                    record = {
                        "task": task.name,
                        "example": index,
                        "spec": spec,
                        "budget": budget,
                        "fingerprint": pipeline.spec.fingerprint,
                        "seed": options.seed,
                        "tokens": len(example.prompt.ids),
                        "full_cache_correct": reference.correct,
                        **one(runner, example, reference, observed, pipeline),
                    }
                    file.write(json.dumps(record) + "\n")
                    file.flush()
        print("all there")


def show(options: argparse.Namespace) -> None:
    """Print the tables and the count."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for folder in options.folder:
        for line in (folder / "results.jsonl").read_text().splitlines():
            record = json.loads(line)
            cell = cells[record["task"], int(record["budget"].removesuffix("x"))]
            cell[record["spec"]][record["seed"], record["example"]] = record
    # Means are over the examples that the spec in question was measured on.
    for key in [key for key, specs in cells.items() if options.spec not in specs]:
        del cells[key]
    for specs in cells.values():
        for name, found in list(specs.items()):
            specs[name] = {i: record for i, record in found.items() if i in specs[options.spec]}
            if not specs[name]:
                del specs[name]
    out = set(options.without.split(","))
    count: dict[str, int] = defaultdict(int)
    summary = []
    for (task, ratio), specs in sorted(cells.items()):
        own = specs[options.spec]
        name = options.spec
        print(f"\n{task} {ratio}x\n| spec | n | KL mean | median | answers | minus {name} | {name} lower |")
        print("|---|---|---|---|---|---|---|")
        standing, ahead = "first", []
        for name, found in sorted(specs.items(), key=lambda item: mean(r["kl"] for r in item[1].values())):
            values = [r["kl"] for r in found.values()]
            hits = [r["same_answer"] for r in found.values() if r["full_cache_correct"]]
            paired = [record["kl"] - own[i]["kl"] for i, record in sorted(found.items())]
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
                    ahead.append(name)
                elif mean(paired) <= error and standing == "first":
                    standing = "tied"
        print(f"\n{options.spec} is {standing}")
        count[standing] += 1
        summary.append(f"| {task} | {ratio}x | {standing} | {', '.join(ahead)} |")
    overview(cells)
    print("\n| task | ratio | standing | lower by more than one standard error |\n|---|---|---|---|")
    print("\n".join(summary))
    print("\n" + ", ".join(f"{name} in {number}" for name, number in count.items()), f"of {len(cells)} settings")


def overview(cells: Cells) -> None:
    """Mean KL of every spec at every ratio, one table a task; the lowest in bold."""
    for task in sorted({task for task, _ in cells}):
        ratios = sorted(ratio for name, ratio in cells if name == task)
        means = {r: {s: mean(x["kl"] for x in f.values()) for s, f in cells[task, r].items()} for r in ratios}
        # Those that were not measured everywhere come last.
        specs = sorted({s for r in ratios for s in means[r]}, key=lambda s: sum(means[r].get(s, 1e3) for r in ratios))
        print(f"\n| {task} | {' | '.join(f'{r}x' for r in ratios)} |\n|---{'|---' * len(ratios)}|")
        for spec in specs:
            row = []
            for r in ratios:
                value = means[r].get(spec)
                text = "" if value is None else f"{value:.3f}"
                row.append(f"**{text}**" if value == min(means[r].values()) else text)
            print(f"| `{spec}` | {' | '.join(row)} |")


def main() -> None:
    """Measure, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.set_defaults(call=run)
    running.add_argument("--text", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--model", default="smollm2")
    running.add_argument("--specs", default=f"gracekv,gracekv-paper,{BASELINES}")
    running.add_argument("--tasks", default=TASKS)
    running.add_argument("--ratios", default=RATIOS)
    running.add_argument("--tokens", type=int, default=900)
    running.add_argument("--limit", type=int, default=12)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--minutes", type=float, default=600)
    showing = commands.add_parser("show")
    showing.set_defaults(call=show)
    showing.add_argument("folder", type=Path, nargs="+")
    showing.add_argument("--spec", default="gracekv")
    showing.add_argument("--without", default="", help="specs left out of the standings, separated by commas")
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
