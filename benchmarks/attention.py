"""Attention over one layer's entries beside the time to read their bytes once, in one run, at SmolLM2's shape.

    python benchmarks/attention.py --entries 32768
    python benchmarks/attention.py --entries 32768 --json benchmarks/results/attention.json

Several copies are attended in turn, so that none stays in a cache. `ragged` has the same entries, shared out over the
heads as 1 : 2 : 3. Codes of AATC are those of vectors without any structure, the slowest to attend: every channel has
bits."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from machine import describe, milliseconds
from torch import Tensor

from kvframe.builtin.kernels import Cpu, Sdpa
from kvframe.registry import registry
from kvframe.rope import Rope
from kvframe.stages import Encoder
from kvframe.types import Entries, LayerObservation, ModelInfo, Observation, Part

HEADS, GROUP, DIM = 3, 3, 64
CACHE_BYTES = 96 << 20  # more than the last-level cache of most machines


def observed(tokens: int) -> Observation:
    """One layer of random keys, values and queries."""
    rope = Rope(1.0 / 100000 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM))
    weights = torch.randn(HEADS * GROUP, DIM, 16)
    model = ModelInfo(1, HEADS * GROUP, HEADS, DIM, DIM**-0.5, rope, lambda _: weights, (0,))
    keys, values = (torch.randn(1, HEADS, tokens, DIM) for _ in range(2))
    layer = LayerObservation(keys, values, torch.randn(1, HEADS * GROUP, 64, DIM))
    every = torch.ones(1, tokens, dtype=torch.bool)
    return Observation((layer,), torch.arange(tokens)[None], every, every, model)


def entries(lengths: list[int], dtype: torch.dtype) -> Entries:
    """Random entries of heads of these lengths."""
    total = sum(lengths)
    keys, values = (torch.randn(total, DIM).to(dtype) for _ in range(2))
    return Entries(torch.tensor([0, *itertools.accumulate(lengths)]), keys, values)


def aatc(tokens: int, **settings: object) -> Part:
    """Codes of AATC, of keys after RoPE unless the settings say otherwise."""
    stage = registry().stages["encoder"]["aatc.transform"]
    encoder = stage(**{"rope": "post", "key_bits": 2.5, "value_bits": 2.5, "calibration": "prompt", **settings})
    state = encoder.fit(observed(min(tokens, 4096)))[0]
    positions = torch.arange(tokens, dtype=torch.int32).repeat(HEADS)
    return Part(
        encoder.encode(replace(entries([tokens] * HEADS, torch.float32), positions=positions), state), encoder, state
    )


def dense(lengths: list[int], dtype: torch.dtype, encoder: str = "dense") -> Part:
    """Entries as they are, or with the codes of another of core's encoders."""
    made: Encoder = registry().stages["encoder"][encoder]()  # type: ignore[assignment, call-arg]
    return Part(made.encode(entries(lengths, dtype), ()), made)


def read(tensors: list[Tensor]) -> None:
    """Read every byte once."""
    for tensor in tensors:
        flat = tensor.flatten().view(torch.uint8)
        flat[: flat.numel() // 8 * 8].view(torch.float32).sum()


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=32768, help="entries of each head")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    n = args.entries
    uniform, ragged = [n] * HEADS, [n // 2, n, n + n // 2]
    cases: dict[str, tuple[Callable[[], Part], torch.dtype]] = {
        "dense fp32": (lambda: dense(uniform, torch.float32), torch.float32),
        "dense fp32, ragged": (lambda: dense(ragged, torch.float32), torch.float32),
        "dense bf16": (lambda: dense(uniform, torch.bfloat16), torch.bfloat16),
        "int8": (lambda: dense(uniform, torch.float32, "int8"), torch.float32),
        "aatc 2.5 bits, joint heads": (lambda: aatc(n), torch.float32),
        "aatc before RoPE, joint heads": (lambda: aatc(n, rope="pre"), torch.float32),
        "aatc 2.5 bits, each head": (lambda: aatc(n, joint_heads=1, scale_bits=8, scope="group"), torch.float32),
    }
    rows = []
    print(f"{'':30}{'MB':>7}{'read':>9}{'cpu':>9}{'sdpa':>9}{'cpu / read':>12}")
    for name, (make, dtype) in cases.items():
        first = make()
        copies = [first, *(make() for _ in range(min(7, max(1, CACHE_BYTES // first.encoded.nbytes))))]
        query = torch.randn(1, HEADS * GROUP, 1, DIM).to(dtype)
        timed = {
            "read": milliseconds(in_turn([lambda p=p: read(list(p.encoded.codes.values())) for p in copies])),
            "cpu": milliseconds(in_turn([lambda p=p, q=query: Cpu().attend(q, p, 0.125) for p in copies])),
            "sdpa": milliseconds(in_turn([lambda p=p, q=query: Sdpa().attend(q, p, 0.125) for p in copies]), 5),
        }
        row = {"case": name, "megabytes": round(first.encoded.nbytes / 1e6, 2)}
        row |= {f"{key}_ms": round(value, 3) for key, value in timed.items()}
        rows.append(row | {"cpu_to_read": round(timed["cpu"] / timed["read"], 2)})
        print(
            f"{name:30}{row['megabytes']:7.1f}{timed['read']:9.2f}{timed['cpu']:9.2f}{timed['sdpa']:9.2f}"
            f"{timed['cpu'] / timed['read']:12.2f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": describe(), "entries": n, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
