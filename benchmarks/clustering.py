"""CentroidKV's claims, measured: what the partition is worth, whether the cost is linear, what decoding and memory
gain, and where the clusters lie.

    python benchmarks/clustering.py similarity               # matched keys by partition, AR(1) keys and a model's
    python benchmarks/clustering.py cost                     # time of the allocator against the number of tokens
    python benchmarks/clustering.py prefill --tokens 2048    # compression beside the prefill, on a model
    python benchmarks/clustering.py decode --context 8192    # a step beside DynamicCache, and rows that fit in memory
    python benchmarks/clustering.py answer --text FILE       # a long answer, the budget checked at every step
    python benchmarks/clustering.py picture --out FILE.png   # sizes of clusters over text, layers and heads

Each prints a table and, as its last line, JSON. Times are the process's CPU time, so that what else the machine does
counts less; compare only what ran in one process. Without --text the text is the Python language reference.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import kvframe
from kvframe.builtin.segmenters import Chunks
from kvframe.ops import soft_matching
from kvframe.rope import Rope
from kvframe.types import LayerObservation, ModelInfo, Observation, Plan
from kvframe_centroidkv.partition import places, scramble, split_chunks

PARTITIONS = ("alternating", "random", "halves")


# --- similarity


def matched_cosine(keys: Tensor, chunk: int) -> dict[str, float]:
    """Mean cosine of every source with its best target, for `keys [U, T, D]` in chunks; and of every key with the best
    other key of its chunk, which no bipartition can exceed."""
    units, tokens, dim = keys.shape
    rows = keys.reshape(-1, dim).float()
    unit = torch.arange(units).repeat_interleave(tokens)
    rank = torch.arange(tokens).repeat(units)
    label = unit * tokens + rank // chunk
    out = {}
    for partition in PARTITIONS:
        sides = split_chunks(label, partition, scramble(0, 0, unit, rank))
        likeness, _ = soft_matching(rows, sides.sources, sides.targets)
        out[partition] = float(likeness[likeness.isfinite()].mean())
    run, place, length = places(label)
    whole = torch.full((len(length), int(length.max())), -1)
    whole[run, place] = torch.arange(len(label))
    unit_rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    cosine = unit_rows[whole.clamp_min(0)] @ unit_rows[whole.clamp_min(0)].mT
    cosine.masked_fill_((whole < 0)[:, None] | torch.eye(whole.shape[1], dtype=torch.bool), -2)
    best = cosine.amax(-1)[whole >= 0]
    out["any other key"] = float(best[best > -2].mean())
    return out


def ar1(rho: float, units: int, tokens: int, dim: int) -> Tensor:
    """Gaussian keys `[U, T, D]` whose correlation falls by `rho` with every token."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(units, tokens, dim, generator=generator)
    keys = torch.empty_like(noise)
    keys[:, 0] = noise[:, 0]
    for t in range(1, tokens):
        keys[:, t] = rho * keys[:, t - 1] + math.sqrt(1 - rho**2) * noise[:, t]
    return keys


def read_ids(args: argparse.Namespace, tokens: int) -> tuple[Any, Tensor]:
    """A model, and the first tokens of the text."""
    from kvframe.eval import embedded_text, read_text
    from kvframe.hf import load_model

    model, tokenizer = load_model(args.model)
    text = embedded_text() if args.text is None else read_text(args.text)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, args.start : args.start + tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(
            f"the text ends after {ids.shape[1]} of {tokens} tokens; give a longer one or a smaller --start"
        )
    return model, ids


def read_prompt(args: argparse.Namespace, specs: list[str]) -> Any:
    """A model's prefill of some text, to be forked for every spec: `(prefill cache, pipelines, seconds)`."""
    from kvframe.hf import Prefill

    model, ids = read_ids(args, args.tokens)
    pipelines = {name: kvframe.load(name, {"budget.ratio": args.ratio}) for name in specs}
    prefill = Prefill(model, pipelines.values())
    begin = time.process_time()
    model(ids, cache=prefill, logits_to_keep=1)
    return prefill, pipelines, time.process_time() - begin


def similarity(args: argparse.Namespace) -> dict[str, Any]:
    """The paper's argument for alternating sides, on keys that forget exponentially and on a model's."""
    rows = {f"AR(1) {rho}": matched_cosine(ar1(rho, 64, 1024, 64), args.chunk) for rho in (0.5, 0.8, 0.95)}
    prefill, _, _ = read_prompt(args, [])
    rope, positions = prefill.info.rope, torch.arange(args.tokens)
    cached = torch.cat([layer.recent.keys[0] for layer in prefill.compressed_layers])[:, 4:]  # without the sinks
    rows["model, cached"] = matched_cosine(cached, args.chunk)
    rows["model, before RoPE"] = matched_cosine(rope.unrotate(cached, positions[4:]), args.chunk)
    names = list(next(iter(rows.values())))
    print(f"mean cosine of matched keys, chunks of {args.chunk}")
    print(f"{'keys':22}" + "".join(f"{name:>16}" for name in names))
    for keys, row in rows.items():
        print(f"{keys:22}" + "".join(f"{row[name]:16.3f}" for name in names))
    return {"chunk": args.chunk, "tokens": args.tokens, "cosine": rows}


# --- cost


def random_observation(layers: int, heads: int, tokens: int, dim: int) -> Observation:
    """Keys that forget slowly, so that passes have something to find."""
    rope = Rope(1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))
    model = ModelInfo(
        layers, heads, heads, dim, dim**-0.5, rope, lambda layer: torch.zeros(heads, dim, 1), tuple(range(layers))
    )
    keys = ar1(0.9, layers * heads, tokens, dim).view(layers, 1, heads, tokens, dim)
    valid = torch.ones(1, tokens, dtype=torch.bool)
    return Observation(tuple(LayerObservation(k, k) for k in keys), torch.arange(tokens)[None], valid, valid, model)


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the allocator, and the exponent of a power of T through the first and the last."""
    rows: dict[str, dict[int, float]] = {}
    for name, chunk in (("centroidkv", 256), ("centroidkv-paper", 64)):
        method = kvframe.load(name).spec.allocator
        rows[name] = {}
        for tokens in args.sizes:
            observation = random_observation(args.layers, args.heads, tokens, 64)
            segments, scores = Chunks(size=chunk).segment(observation), torch.rand(observation.shape)
            budget = torch.tensor([args.layers * args.heads * tokens // 4])
            times = []
            for _ in range(args.repeats):
                begin = time.process_time()
                method.allocate(observation, segments, scores, budget)
                times.append((time.process_time() - begin) * 1000)
            rows[name][tokens] = round(min(times), 1)
    print(f"ms of allocate at ratio 4, {args.layers} layers of {args.heads} heads of 64 channels")
    print(f"{'tokens':22}" + "".join(f"{tokens:>10}" for tokens in args.sizes) + f"{'exponent':>12}")
    exponents = {}
    for name, row in rows.items():
        first, last = args.sizes[0], args.sizes[-1]
        exponents[name] = round(math.log(row[last] / row[first]) / math.log(last / first), 2)
        print(f"{name:22}" + "".join(f"{row[tokens]:10.1f}" for tokens in args.sizes) + f"{exponents[name]:12.2f}")
    return {"milliseconds": rows, "exponent": exponents}


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of the compression, scores included, beside that of the prefill; bytes and raggedness."""
    specs = ["centroidkv", "centroidkv-paper", "snapkv"]
    cache, pipelines, seconds = read_prompt(args, specs)
    rows: dict[str, dict[str, float]] = {}
    for name, pipeline in pipelines.items():
        times = []
        for _ in range(args.repeats):
            fork = cache.fork(pipeline)
            begin = time.process_time()
            fork.compress()
            times.append(time.process_time() - begin)
        report = fork.report()
        lengths = torch.stack([layer.parts[-1].encoded.offsets.diff() for layer in fork.compressed_layers])  # [L, H]
        rows[name] = {
            "compress_ms": round(min(times) * 1000, 1),
            "share_of_prefill": round(min(times) / seconds, 4),
            "entry_ratio": round(report.entry_ratio, 3),
            "byte_ratio": round(report.byte_ratio, 3),
            "shortest_head": int(lengths.min()),
            "longest_head": int(lengths.max()),
            # What a rectangular layout would hold instead.
            "padded_layers": round(float(lengths.amax(1).sum() * lengths.shape[1] / lengths.sum()), 3),
            "padded_cache": round(float(lengths.max() * lengths.numel() / lengths.sum()), 3),
        }
    print(f"{args.tokens} tokens, prefill {seconds:.2f} s of CPU time, ratio {args.ratio:g}")
    columns = list(next(iter(rows.values())))
    print(f"{'spec':18}" + "".join(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{row[column]:>18}" for column in columns))
    return {"tokens": args.tokens, "prefill_s": round(seconds, 2), "specs": rows}


# --- decoding


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """A single-token step beside DynamicCache, and the rows of a batch that fit into a fixed memory, from the bytes
    that both really hold. Keys are random: heads get the entries that random keys give them."""
    from decode import SMOLLM2, fill, step
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    pipeline = kvframe.load("centroidkv", {"budget.ratio": args.ratio})
    stock, ours = DynamicCache(config=model.config), pipeline.cache(model)
    fill(model, stock, args.context, args.batch)
    fill(model, ours, args.context, args.batch)
    ours.compress()
    report = ours.report()
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    times: dict[str, list[float]] = {"stock": [], "kvframe": []}
    for index in range(args.steps + 3):
        for name, cache in (("stock", stock), ("kvframe", ours)):
            elapsed = step(model, cache, args.batch)
            if index >= 3:
                times[name].append(elapsed)
    stock_ms, ours_ms = (statistics.median(times[name]) for name in ("stock", "kvframe"))
    memory = args.memory << 20
    fits = {"stock": memory * args.batch // full, "kvframe": memory * args.batch // report.bytes}
    print(f"context {args.context}, batch {args.batch}, ratio {report.entry_ratio:.2f} in entries")
    print(f"step: DynamicCache {stock_ms:.1f} ms, centroidkv {ours_ms:.1f} ms, {stock_ms / ours_ms:.2f} x as fast")
    print(f"bytes: {full} and {report.bytes}, {full / report.bytes:.2f} x fewer")
    print(f"rows in {args.memory} MiB: {fits['stock']} and {fits['kvframe']}")
    return {
        "context": args.context,
        "batch": args.batch,
        "entry_ratio": round(report.entry_ratio, 3),
        "stock_ms": round(stock_ms, 2),
        "kvframe_ms": round(ours_ms, 2),
        "speedup": round(stock_ms / ours_ms, 3),
        "full_bytes": full,
        "bytes": report.bytes,
        "rows": fits,
    }


def windowed(model: Any, ids: Tensor, prompt: int, ratio: float | None) -> float:
    """NLL of what follows the prompt, with all tokens in sight or, after the prompt, 4 sinks and as many of the last
    tokens as the ratio allows: StreamingLLM as a window that moves with every token."""
    tokens = ids.shape[1]
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = key <= query
    if ratio is not None:
        window = ((query + 1) / ratio).floor() - 4
        seen &= (query < prompt) | (key < 4) | (key > query - window)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    logits = model(ids, attention_mask=bias, use_cache=False, logits_to_keep=tokens - prompt + 1).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, prompt:]))


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """A prompt and text after it, fed token by token while the cache compresses it in blocks: the entries at every step
    against the budget, and the text's NLL, beside StreamingLLM in blocks and as a moving window of as many entries."""
    new, prompt = args.new, args.tokens
    model, ids = read_ids(args, prompt + new)
    rows: dict[str, dict[str, float]] = {
        "full attention": {"nll": windowed(model, ids, prompt, None)},
        "moving window": {"nll": windowed(model, ids, prompt, args.ratio)},
    }
    again = {"allocator.recluster": True}
    contenders = (("centroidkv", {}), ("centroidkv", again), ("centroidkv-paper", {}), ("streamingllm", {}))
    for spec, extra in contenders:
        name = spec if not extra else f"{spec} recluster"
        pipeline = kvframe.load(spec, {"budget.ratio": args.ratio, "decode.flush": args.flush, **extra})
        cache = pipeline.cache(model)
        logits = model(ids[:, :prompt], cache=cache, logits_to_keep=1).logits[:, -1]
        units = cache.info.layers * cache.info.kv_heads
        recent = pipeline.spec.protect.recent
        nll, most, held = 0.0, 0.0, 0.0
        begin = time.process_time()
        for index in range(new):
            token = ids[:, prompt + index]
            nll -= float(logits.log_softmax(-1)[0, token])
            logits = model(token[:, None], cache=cache).logits[:, -1]
            body = sum(int(part.encoded.offsets[-1]) for layer in cache.compressed_layers for part in layer.parts)
            exact = cache.compressed_layers[0].recent.length
            # The share of all tokens up to the window's beginning, and the window; a block may be waiting behind it.
            allowed = units * (prompt + index + 1 - (exact - recent)) / args.ratio
            most = max(most, (body + units * recent) / allowed)
            held = (body + units * exact) / units
            if exact > recent + args.flush:
                raise SystemExit(f"{name} holds {exact} exact tokens at step {index}")
        rows[name] = {
            "nll": nll / new,
            "most_of_budget": round(most, 4),
            "entries_per_head": round(held, 1),
            "step_ms": round((time.process_time() - begin) * 1000 / new, 1),
        }
    print(f"prompt {prompt}, answer {new}, ratio {args.ratio:g}, blocks of {args.flush}")
    for name, row in rows.items():
        row["nll"] = round(row["nll"], 4)
        budget = f", at most {row['most_of_budget']:.4f} of the budget at any step" if "most_of_budget" in row else ""
        print(f"{name:22} NLL {row['nll']:.4f}{budget}")
    return {"prompt": prompt, "new": new, "ratio": args.ratio, "flush": args.flush, "start": args.start, "specs": rows}


# --- picture


def picture(args: argparse.Namespace) -> dict[str, Any]:
    """Draw how many tokens the entry of each token stands for, and how many entries each head has."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plans: dict[str, Plan] = {}
    specs = ["centroidkv", "centroidkv-paper"]
    cache, pipelines, _ = read_prompt(args, specs)
    for name, pipeline in pipelines.items():
        plan = pipeline.plan

        def keep(*given: Any, name: str = name, plan: Any = plan) -> Plan:
            plans[name] = plan(*given)
            return plans[name]

        object.__setattr__(pipeline, "plan", keep)
        cache.fork(pipeline).compress()
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), width_ratios=(4, 1), layout="constrained")
    result: dict[str, Any] = {}
    for (left, right), name in zip(axes, specs, strict=True):
        sizes, counts = [], []
        for layer in plans[name].layers:
            ids = layer.assignment[0].long()
            size = torch.zeros(len(ids), ids.shape[1] + 1).scatter_add_(1, ids.clamp_min(-1) + 1, torch.ones(ids.shape))
            sizes.append(torch.where(ids >= 0, size.gather(1, ids + 1), 1))
            counts.append(layer.n_entries[0])
        grid, entries = torch.cat(sizes), torch.stack(counts)  # [L*H, T], [L, H]
        heads = entries.shape[1]
        image = left.imshow(grid.log2(), aspect="auto", cmap="viridis", interpolation="nearest", vmin=0, vmax=8)
        left.set(title=f"{name}, ratio {args.ratio:g}", xlabel="token", ylabel="layer")
        left.set_yticks(range(0, len(grid), 5 * heads), range(0, len(entries), 5))
        figure.colorbar(image, ax=left, label="tokens in its entry (log2)", pad=0.01)
        mean = entries.double().mean(1)
        right.barh(range(len(entries)), mean, color="0.75")
        right.plot(entries, range(len(entries)), ".", color="black", markersize=3)
        right.invert_yaxis()
        right.set(title="entries a head", xlabel="bar: mean of the layer", xlim=(0, None))
        result[name] = {
            "largest": int(grid.max()),
            "single": round(float((grid == 1).float().mean()), 3),
            "entries": [int(entries.min()), int(entries.max())],
        }
    figure.savefig(args.out, dpi=110)
    for name, row in result.items():
        print(f"{name:18} largest cluster {row['largest']}, tokens alone {row['single']:.0%}, entries {row['entries']}")
    return {"tokens": args.tokens, "out": args.out, "specs": result}


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Any, tokens: int | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(run.__name__, help=run.__doc__.split(".")[0])
        sub.set_defaults(run=run)
        sub.add_argument("--ratio", type=float, default=4)
        sub.add_argument("--threads", type=int, default=1)
        if tokens is not None:
            sub.add_argument("--model", default="smollm2")
            sub.add_argument("--text")
            sub.add_argument("--start", type=int, default=0, help="first token of the text")
            sub.add_argument("--tokens", type=int, default=tokens)
        return sub

    command(similarity, 960).add_argument("--chunk", type=int, default=64)
    sub = command(cost)
    sub.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    sub.add_argument("--layers", type=int, default=6)
    sub.add_argument("--heads", type=int, default=3)
    sub.add_argument("--repeats", type=int, default=3)
    command(prefill, 2048).add_argument("--repeats", type=int, default=3)
    sub = command(decode)
    sub.add_argument("--context", type=int, default=8192)
    sub.add_argument("--batch", type=int, default=1)
    sub.add_argument("--steps", type=int, default=15)
    sub.add_argument("--memory", type=int, default=1024, help="MiB")
    sub = command(answer, 512)
    sub.add_argument("--new", type=int, default=1024)
    sub.add_argument("--flush", type=int, default=32)
    command(picture, 960).add_argument("--out", default="clusters.png")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    result = args.run(args)
    result |= {"threads": torch.get_num_threads(), "machine": platform.processor() or platform.machine()}
    print(json.dumps({"measurement": args.command, **result}))


if __name__ == "__main__":
    main()
