"""Attention of one decode step on a CUDA device: kvframe's Triton kernels beside torch's SDPA over the full cache.

    python benchmarks/gpu.py

One layer of Llama-3-8B's shape (8 KV heads of 128 channels, 32 query heads, bf16), batch 1. `ratio 4` holds a quarter
of the entries, with multiplicities, unequally shared out over the heads. Times are medians over launches that find the
second-level cache cleared; `GB/s` is what the bytes held over the time come to. Codes are random ones."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from machine import describe
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.kernels import Triton
from kvframe.ops import Packed, PackedRows, packed_attention
from kvframe.types import Entries, Part

HEADS, GROUP, DIM = 8, 4, 128
CONTEXTS = (8192, 32768, 131072)


def entries(lengths: list[int], weighted: bool) -> Entries:
    total = sum(lengths)
    keys, values = (torch.randn(total, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    count = torch.rand(total, device="cuda") * 2 if weighted else None
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    return Entries(offsets, keys, values, count)


def packed(tokens: int) -> tuple[tuple[Packed, Packed], PackedRows]:
    """Random codes of each head by itself, 2.5 bits a channel."""
    segments = (((3, DIM // 2), (2, DIM // 2)),) * HEADS
    words = HEADS * tokens // 32 * (DIM * 5 // 2)
    sides = [
        Packed(
            torch.randint(-(2**31), 2**31 - 1, (words,), device="cuda", dtype=torch.int32),
            torch.rand(HEADS * tokens, device="cuda").bfloat16(),
            None,
            segments,
            levels,
        )
        for levels in (False, True)
    ]
    offsets = torch.arange(HEADS + 1, device="cuda") * tokens
    return (sides[0], sides[1]), PackedRows((tokens,) * HEADS, HEADS, 1, offsets, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    query = torch.randn(1, HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.bfloat16)
    scale, rows = DIM**-0.5, []
    print(torch.cuda.get_device_name())
    for context in CONTEXTS:
        full = entries([context] * HEADS, False)
        keys, values = (t.view(1, HEADS, context, DIM) for t in (full.keys, full.values))
        share = [context // 8 + context // 4 * index // (HEADS - 1) for index in range(HEADS)]
        ragged = entries(share, True)
        parts = {
            "full": Part(Dense().encode(full, ()), Dense()),
            "ratio 4": Part(Dense().encode(ragged, ()), Dense()),
            "int8": Part(Int8().encode(full, ()), Int8()),
            "int8, ratio 4": Part(Int8().encode(ragged, ()), Int8()),
        }
        sides, held = packed(context)
        asked = torch.randn(HEADS, GROUP, DIM, device="cuda") / DIM
        added = torch.zeros(HEADS, GROUP, device="cuda")
        calls = {
            "SDPA, full": (
                lambda k=keys, v=values: scaled_dot_product_attention(query, k, v, scale=scale, enable_gqa=True),
                2 * keys.numel() * 2,
            ),
            **{
                f"kvframe, {name}": (lambda p=part: Triton().attend(query, p, scale), part.encoded.nbytes)
                for name, part in parts.items()
            },
            "kvframe, code space 2.5 bits": (
                lambda q=asked, c=added, s=sides, h=held: packed_attention(q, c, *s, h, "triton"),
                sum(s.words.numel() * 4 + s.scales.numel() * 2 for s in sides),
            ),
        }
        stock = None
        for name, (call, size) in calls.items():
            ms = do_bench(call, return_mode="median")
            stock = ms if stock is None else stock
            rows.append({"context": context, "case": name, "ms": round(ms, 4), "megabytes": round(size / 1e6, 1)})
            print(f"{context:7} {name:30}{ms:9.3f} ms {size / ms / 1e6:8.0f} GB/s {stock / ms:7.2f} x SDPA")
    if args.json:
        described = describe() | {"device": torch.cuda.get_device_name()}
        args.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
