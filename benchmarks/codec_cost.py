"""What coding costs: the share of a prefill that compressing it takes, a flush beside a decode step, and the bytes of a
long cache against the same cache in bfloat16.

    python benchmarks/codec_cost.py --spec aatc --tokens 2048
    python benchmarks/codec_cost.py --spec aatc-paper --tokens 2048 --context 8192

Times are processor seconds of one thread in one process, so that other programs on the machine change little; each is
the median of a few runs. The long cache is filled with random keys and values of the model's shape: bytes do not depend
on what they hold."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

import kvframe
from kvframe.eval.text import embedded_text, read_text
from kvframe.hf import CompressedCache, Prefill, load_model


def seconds(action: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def feed(model: torch.nn.Module, cache: CompressedCache, ids: torch.Tensor) -> None:
    """Let the model read tokens `[1, T]`."""
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)


def times(model: torch.nn.Module, pipeline: kvframe.Pipeline, ids: torch.Tensor, runs: int) -> None:
    """Print prefill, compression, steps and flushes."""
    prefill = Prefill(model, [pipeline])
    read = seconds(lambda: feed(model, prefill, ids))
    pipeline.cache(model)  # binds, which is done once
    compress, step, flush = [], [], []
    token = ids[:, :1]
    for _ in range(runs):
        cache = prefill.fork(pipeline)
        compress.append(seconds(cache.compress))
        for _ in range(pipeline.spec.decode.flush or 0):
            before = cache.ledger.compressions
            spent = seconds(lambda cache=cache: feed(model, cache, token))
            (flush if cache.ledger.compressions > before else step).append(spent)
        spent = seconds(lambda cache=cache: feed(model, cache, token))
        (flush if cache.ledger.compressions > before else step).append(spent)
    full = prefill.fork()
    plain = [seconds(lambda: feed(model, full, token)) for _ in range(8)]
    print(f"prefill of {ids.shape[1]} tokens      {read:8.3f} s")
    print(f"compression                  {median(compress):8.3f} s = {100 * median(compress) / read:.1f} % of it")
    print(f"decode step, exact cache     {median(plain):8.3f} s")
    print(f"decode step, compressed      {median(step):8.3f} s")
    if flush:
        print(f"decode step with a flush     {median(flush):8.3f} s, the flush {median(flush) - median(step):.3f} s")


def bytes_of(model: torch.nn.Module, pipeline: kvframe.Pipeline, context: int) -> None:
    """Print the bytes of a cache of `context` tokens in bfloat16."""
    cache = pipeline.cache(model)
    info, generator = cache.info, torch.Generator().manual_seed(0)
    positions = torch.arange(context)[None]
    for index in info.layer_ids:
        shape = (1, info.kv_heads, context, info.head_dim)
        keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        passed_on: dict[str, Any] = {"position_ids": positions}
        cache.update(keys, values, index, kwargs=passed_on)
        # What attention does first; the keys stand for queries.
        passed_on["kvframe_layer"].watch_query(keys, None)
    cache.compress()
    report = cache.report()
    print(
        f"{context} tokens in bfloat16      {report.full_bytes} bytes, held {report.bytes}: {report.byte_ratio:.3f} x"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="aatc")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="override")
    parser.add_argument("--text", type=Path, help="default: the Python language reference")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model)
    overrides = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.override)}
    pipeline = kvframe.load(args.spec, overrides)
    text = embedded_text() if args.text is None else read_text(args.text)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: args.tokens]])
    print(f"{args.spec} {' '.join(args.override)} on {args.model}, {platform.machine()}, one thread")
    if args.tokens:
        times(model, pipeline, ids, args.runs)
    if args.context:
        bytes_of(model, pipeline, args.context)


if __name__ == "__main__":
    main()
