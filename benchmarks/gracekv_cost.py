"""What GraceKV's compression costs: its share of the prefill's processor time, and the memory it needs on top of the
cache, against the length of the prompt.

    python benchmarks/gracekv_cost.py --text book.txt --lengths 512,1024,2048,4096 --specs gracekv,gracekv-paper

One thread, processor time, in one process: only the ratios mean anything. A first compression is not timed. Memory is
given in shares of the full cache: what was kept of the prefill for the stages to look at, the tensors alive at
most while compressing, and what the process grew by, with the allocator's slack. With --plot the table is drawn as
well."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

import kvframe
from kvframe.hf import load_model


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_of(action: Callable[[], None]) -> int:
    """Bytes that the action needed at most beyond what was there before."""
    gc.collect()
    # What the prefill freed must not hide what comes now.
    ctypes.CDLL(None).malloc_trim(0)
    before, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    action()
    done.set()
    thread.join()
    return max(0, highest - before)


def tensors_of(action: Callable[[], None]) -> int:
    """Bytes of tensors that the action had alive at most, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in steps))


def measure(model: torch.nn.Module, ids: torch.Tensor, spec: str, ratio: float) -> dict[str, float]:
    """Shares of one spec on one prompt."""
    cache = kvframe.load(spec, {"budget.ratio": ratio}).cache(model)  # type: ignore[arg-type]
    begin = time.process_time()
    model(ids, cache=cache, logits_to_keep=1)
    prefill = time.process_time() - begin
    plain = kvframe.load("identity").cache(model)  # type: ignore[arg-type]
    begin = time.process_time()
    model(ids, cache=plain, logits_to_keep=1)
    stock = time.process_time() - begin
    del plain
    full = sum(t.numel() * t.element_size() for x in cache.compressed_layers for t in (x.recent.keys, x.recent.values))
    watched = cache.report().bytes_by_part["observed"]
    cache.fork().compress()
    grown = peak_of(cache.fork().compress)
    tensors = tensors_of(cache.fork().compress)
    begin = time.process_time()
    cache.compress()
    spent = time.process_time() - begin
    return {
        "prefill_s": stock,
        "observing": prefill / stock - 1,
        "compressing": spent / stock,
        "observed_bytes": watched / full,
        "tensor_bytes": tensors / full,
        "grown_bytes": grown / full,
        "entry_ratio": cache.report().entry_ratio,
        "byte_ratio": cache.report().byte_ratio,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--specs", default="gracekv,gracekv-paper,snapkv")
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--repeat", type=int, default=3, help="runs; the median is printed")
    parser.add_argument("--plot", type=Path, help="image to draw (needs matplotlib)")
    parser.add_argument("--torch", action="store_true", help="make the interval tables without numba")
    options = parser.parse_args()
    if options.torch:
        importlib.import_module("kvframe.ops.interval_distortion").compiled = lambda: False
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(options.model)
    ids = tokenizer(options.text.read_text(), return_tensors="pt", verbose=False).input_ids
    lengths, rows = [int(n) for n in options.lengths.split(",")], {}
    print("| spec | tokens | prefill s | observing / prefill | compressing / prefill | observed / cache "
          "| tensors / cache | process / cache | ratio | byte ratio |\n" + "|---" * 10 + "|")  # fmt: skip
    for spec in options.specs.split(","):
        for n in lengths:
            runs = [measure(model, ids[:, i * 100 : i * 100 + n], spec, options.ratio) for i in range(options.repeat)]
            row = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
            rows[spec, n] = row
            print(
                f"| {spec} | {n} | {row['prefill_s']:.2f} | {row['observing']:.0%} | {row['compressing']:.0%} | "
                f"{row['observed_bytes']:.0%} | {row['tensor_bytes']:.0%} | {row['grown_bytes']:.0%} | "
                f"{row['entry_ratio']:.2f} | {row['byte_ratio']:.2f} |",
                flush=True,
            )
    if options.plot:
        draw(rows, lengths, options.specs.split(","), options.plot)


def draw(rows: dict[tuple[str, int], dict[str, float]], lengths: list[int], specs: list[str], path: Path) -> None:
    """Two curves a spec."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axis, name, title in zip(axes, ("compressing", "tensor_bytes"), ("time", "memory"), strict=True):
        for spec in specs:
            axis.plot(lengths, [100 * rows[spec, n][name] for n in lengths], marker="o", label=spec)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_xlabel("tokens of the prompt")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{title} of the compression")
    axes[0].set_ylabel("% of the prefill's")
    axes[1].set_ylabel("tensors beyond the cache, % of it")
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
