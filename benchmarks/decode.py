"""Decode time of kvframe's cache beside transformers' DynamicCache, in one run on a model of SmolLM2's shape.

The caches are filled with random keys and values of the asked length, so that no long prefill is needed; a step does
not depend on what they hold. Steps of the two caches alternate, so that both see the same machine.

    python benchmarks/decode.py --context 8192 --spec identity
    python benchmarks/decode.py --context 32768 --spec snapkv --ratio 4
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvframe
from kvframe.hf.cache import CompressedCache
from kvframe.hf.masks import watch_mask

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": True,
}


def fill(model: LlamaForCausalLM, cache: DynamicCache | CompressedCache, context: int, batch: int) -> None:
    """Give every layer `context` random tokens, as a prefill would leave them."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(context)[None]
    query = torch.randn(batch, config.num_attention_heads, 64, 64, generator=generator)
    for index in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, context, 64)
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        passed_on = {"position_ids": positions}
        cache.update(keys, values, index, kwargs=passed_on)
        if isinstance(cache, CompressedCache):
            layer = passed_on["kvframe_layer"]
            layer.cache.reached()
            if layer is layer.cache.compressed_layers[0]:
                watch_mask(layer.cache, 0, context, None)
            if layer.queries.limit:
                layer.queries.append(query)


def step(model: LlamaForCausalLM, cache: DynamicCache | CompressedCache, batch: int) -> float:
    """Milliseconds of one single-token step."""
    token = torch.full((batch, 1), 7)
    begin = time.perf_counter()
    model(token, cache=cache, use_cache=True)
    return (time.perf_counter() - begin) * 1000


def main() -> None:
    """Print the medians, their ratio and the bytes held, as text and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--spec", default="identity")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    overrides = {} if args.ratio is None else {"budget.ratio": args.ratio}
    pipeline = kvframe.load(Path(args.spec) if args.spec.endswith(".yaml") else args.spec, overrides)
    stock, ours = DynamicCache(config=model.config), pipeline.cache(model)
    fill(model, stock, args.context, args.batch)
    fill(model, ours, args.context, args.batch)
    ours.compress()
    times: dict[str, list[float]] = {"stock": [], "kvframe": []}
    for index in range(args.steps + 3):
        for name, cache in (("stock", stock), ("kvframe", ours)):
            elapsed = step(model, cache, args.batch)
            if index >= 3:
                times[name].append(elapsed)
    report = ours.report()
    stock_ms, ours_ms = (statistics.median(times[name]) for name in ("stock", "kvframe"))
    result = {
        "context": args.context,
        "batch": args.batch,
        "spec": args.spec,
        "entry_ratio": round(report.entry_ratio, 3),
        "byte_ratio": round(report.byte_ratio, 3),
        "stock_ms": round(stock_ms, 2),
        "kvframe_ms": round(ours_ms, 2),
        "speedup": round(stock_ms / ours_ms, 3),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
    }
    speedup = stock_ms / ours_ms
    print(f"stock DynamicCache {stock_ms:.1f} ms a step, {args.spec} {ours_ms:.1f} ms: {speedup:.2f} x as fast")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
