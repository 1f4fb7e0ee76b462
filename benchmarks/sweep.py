"""Decode step against context length and batch, beside stock and preallocated full caches and the bandwidth floor.

    python benchmarks/sweep.py run --contexts 1024 8192 32768 --out benchmarks/results/decode.json
    python benchmarks/sweep.py run --contexts 8192 --batch 4 --specs snapkv --out benchmarks/results/decode.json
    python benchmarks/sweep.py show benchmarks/results/decode.json

A model of SmolLM2's shape with random weights; caches filled with random keys and values (see `decode.py`). All
contenders of one context and batch take their steps in turn in one process. A run adds its rows to the file, in place
of those with the same context, batch and contender. The floor is the time to read the weights and what the cache holds
once, at the speed that the same run measured. What AATC learns is not counted: it belongs to the model. Random vectors
have no structure, so that it gives bits to every channel: its slowest case. `--specs quantised` is transformers' own
quantised cache, which needs optimum-quanto, ninja and a compiler; what it holds is not measured."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
from decode import SMOLLM2, fill, step
from machine import read_speed, save_figure, write_rows
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer, QuantizedCache

import kvframe
from kvframe.hf.cache import CompressedCache

PROMPT = {"encoder.calibration": "prompt"}
POST = {**PROMPT, "encoder.key_bits": 2.5, "encoder.value_bits": 2.5}
SPECS: dict[str, tuple[str, dict[str, object]]] = {
    "identity": ("identity", {}),
    "int8": ("int8", {}),
    "snapkv": ("snapkv", {"budget.ratio": 4}),
    "snapkv-fixed": ("snapkv", {"budget": {"entries": 1024}}),
    "adakv": ("adakv", {"budget.ratio": 4}),
    "centroidkv": ("centroidkv", {"budget.ratio": 4}),
    "aatc": ("aatc", PROMPT),
    "aatc-codespace": ("aatc-codespace", POST),
    "aatc-codespace-heads": (
        "aatc-codespace",
        {**POST, "encoder.joint_heads": 1, "encoder.scale_bits": 8, "encoder.scope": "group"},
    ),
    "graded": ("snapkv+aatc", {**PROMPT, "budget.ratio": 16}),
    "graded-codespace": (
        "snapkv+aatc",
        {**PROMPT, "budget.ratio": 16, "encoder.rope": "post", "encoder.key_shift": 0},
    ),
}
LABELS = {
    "stock": "DynamicCache",
    "preallocated": "preallocated, full",
    "empty": "a context of one token",
    "quantised": "transformers' QuantizedCache, 4 bits",
    "snapkv": "SnapKV, ratio 4",
    "snapkv-fixed": "SnapKV, 1024 entries a head",
    "adakv": "AdaKV, ratio 4",
    "centroidkv": "CentroidKV, ratio 4",
    "aatc": "AATC 2.5 bits, before RoPE",
    "aatc-codespace": "AATC 2.5 bits, code space",
    "aatc-codespace-heads": "AATC 2.5 bits, code space, each head",
    "graded": "1, 2 and 4 bits, 16x fewer bytes, before RoPE",
    "graded-codespace": "1, 2 and 4 bits, 16x fewer bytes, code space",
}
SPARE = 64  # columns of the preallocated cache beyond the prompt


class Preallocated(DynamicLayer):
    """A full cache whose columns are all there from the start: a step writes one, and copies nothing."""

    length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.length == 0:
            rows, heads, tokens, dim = key_states.shape
            self.buffers = [key_states.new_empty(rows, heads, tokens + SPARE, dim) for _ in range(2)]
            self.is_initialized = True
        end = self.length + key_states.shape[2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self.buffers[0][:, :, :end], self.buffers[1][:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def full_cache(config: LlamaConfig, layer: type[DynamicLayer]) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [layer() for _ in cache.layers]
    return cache


def held(cache: DynamicCache | CompressedCache) -> int:
    """Bytes that the cache holds."""
    if isinstance(cache, CompressedCache):
        report = cache.report()
        return report.bytes - report.bytes_by_part.get("learned", 0)
    if isinstance(cache, QuantizedCache):
        return 0  # its tensors are of a class of their own, which does not tell
    tensors = [getattr(layer, "buffers", None) or [layer.keys, layer.values] for layer in cache.layers]
    return sum(t.untyped_storage().nbytes() for pair in tensors for t in pair)


def measure(context: int, batch: int, names: list[str], steps: int) -> list[dict[str, object]]:
    """Median milliseconds of a step of each contender."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    caches: dict[str, DynamicCache | CompressedCache] = {}
    spent: dict[str, float] = {}
    for name in ("stock", "preallocated", "empty", *names):
        if name == "quantised":
            cache = QuantizedCache(backend="quanto", config=model.config, nbits=4, residual_length=128)
        elif name in SPECS:
            spec, overrides = SPECS[name]
            cache = kvframe.load(spec, overrides).cache(model)
        else:
            cache = full_cache(model.config, DynamicLayer if name == "stock" else Preallocated)
        fill(model, cache, 1 if name == "empty" else context, batch)
        if isinstance(cache, CompressedCache):
            begin = time.perf_counter()
            cache.compress()
            spent[name] = time.perf_counter() - begin
        caches[name] = cache
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in caches}
    for index in range(steps + 2):
        for name, cache in caches.items():
            elapsed = step(model, cache, batch)
            if index >= 2:
                times[name].append(elapsed)
    speed = read_speed()
    rows = []
    for name, cache in caches.items():
        size = held(cache)
        row = {"context": context, "batch": batch, "contender": name, "ms": round(statistics.median(times[name]), 2)}
        row |= {"megabytes": round(size / 1e6, 1), "floor_ms": round((weights + size) / speed, 2)}
        rows.append(row | ({"compress_s": round(spent[name], 2)} if name in spent else {}))
        print(f"{context:7} {batch:3} {name:22}{row['ms']:9} ms  floor {row['floor_ms']:8} ms {row['megabytes']:9} MB")
    return rows


def run(args: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for context in args.contexts:
        rows = measure(context, args.batch, args.specs, args.steps)
        new = {(r["context"], r["batch"], r["contender"]) for r in rows}
        known = [r for r in known if (r["context"], r["batch"], r["contender"]) not in new] + rows
        known.sort(key=lambda r: (r["batch"], r["context"]))
        write_rows(args.out, known)


def show(args: argparse.Namespace) -> None:
    """The table of speed-ups, and plots beside the file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    data = json.loads(args.file.read_text())
    print(json.dumps(data["machine"]))
    print("| context | batch | cache | ms | times stock's speed | MB | ms over floor |\n|---|---|---|---|---|---|---|")
    for row in data["rows"]:
        stock = next(
            r["ms"]
            for r in data["rows"]
            if r["contender"] == "stock" and (r["context"], r["batch"]) == (row["context"], row["batch"])
        )
        label = LABELS.get(row["contender"], row["contender"])
        print(
            f"| {row['context']} | {row['batch']} | {label} | {row['ms']:.1f} | {stock / row['ms']:.2f} "
            f"| {row['megabytes']:.0f} | {row['ms'] - row['floor_ms']:.1f} |"
        )
    batches = sorted({row["batch"] for row in data["rows"]})
    figure, axes = plt.subplots(1, len(batches), figsize=(2 + 4 * len(batches), 5), squeeze=False)
    names = [
        n
        for n in ("stock", "preallocated", "empty", "quantised", *SPECS)
        if any(r["contender"] == n for r in data["rows"])
    ]
    colors, lines = plt.get_cmap("tab20"), {}
    for ax, batch in zip(axes[0], batches, strict=True):
        for index, name in enumerate(names):
            points = [(r["context"], r["ms"]) for r in data["rows"] if (r["contender"], r["batch"]) == (name, batch)]
            if points:
                ax.plot(
                    *zip(*sorted(points), strict=True),
                    marker="o",
                    ms=4,
                    color=colors(index),
                    label=LABELS.get(name, name),
                )
        floor = sorted(
            (r["context"], r["floor_ms"]) for r in data["rows"] if (r["contender"], r["batch"]) == ("stock", batch)
        )
        ax.plot(*zip(*floor, strict=True), color="black", ls=":", label="reading a full cache and the weights once")
        ax.set(
            xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms a decode step", title=f"batch {batch}"
        )
        ticks = sorted({r["context"] for r in data["rows"] if r["batch"] == batch})
        ax.set_xticks(ticks, [f"{t // 1024}k" for t in ticks])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_yticks([20, 50, 100, 200, 500, 1000])
        ax.grid(alpha=0.3)
        lines |= {line.get_label(): line for line in ax.lines}
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=2 + (len(batches) > 1), fontsize=8)
    save_figure(figure, args.file)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--contexts", type=int, nargs="+", required=True)
    runs.add_argument("--batch", type=int, default=1)
    runs.add_argument(
        "--specs", nargs="+", default=["identity", "snapkv", "aatc-codespace"], choices=[*SPECS, "quantised"]
    )
    runs.add_argument("--steps", type=int, default=11)
    runs.add_argument("--out", type=Path, required=True)
    runs.set_defaults(call=run)
    shows = commands.add_parser("show")
    shows.add_argument("file", type=Path)
    shows.set_defaults(call=show)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
