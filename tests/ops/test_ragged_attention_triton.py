"""The Triton kernel: against the reference in the interpreter, and built for each target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_build import TARGETS, build

from kvframe import capping
from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.kernels import Triton
from kvframe.errors import InputError
from kvframe.ops.ragged_attention.reference import ragged_attention as reference
from kvframe.testing.numerics import cap_tolerance
from kvframe.types import Encoded, Entries, Part

# batch, KV heads, group, queries, D, longest head, weighted
SHAPES = [
    (1, 1, 1, 1, 8, 1, False),
    (2, 3, 3, 1, 64, 70, True),
    (3, 2, 2, 5, 24, 9, True),
    (1, 2, 4, 20, 16, 130, False),
    (2, 1, 1, 3, 40, 0, False),
]
# scale and cap: logits as usual, around a small cap, and of several hundred under one that models have
LOGITS = [(0.3, None), (0.3, 1.5), (30.0, 50.0)]


def make(batch, heads, group, length, dim, longest, weighted, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(batch + longest)
    counts = torch.randint(0, longest + 1, (batch * heads,), generator=generator)
    counts[-1] = longest
    if batch * heads > 1:
        counts[0] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    total = int(offsets[-1])
    keys, values = (torch.randn(total, dim, generator=generator).to(dtype) for _ in range(2))
    log_multiplicity = torch.rand(total, generator=generator) * 3 if weighted else None
    query = torch.randn(batch, heads * group, length, dim, generator=generator).to(dtype)
    moved = [t if t is None else t.to(device) for t in (query, offsets, keys, values, log_multiplicity)]
    return moved[0], Entries(*moved[1:])


def check(shape, encoder, dtype, device="cpu", kernel=None, scale=0.3, softcap=None):
    """The kernel against the reference in fp64 on the same codes."""
    query, entries = make(*shape, dtype, device)
    part = Part(encoder.encode(entries, ()), encoder)
    rebuilt = encoder.decode(encoder.encode(Entries(entries.offsets, entries.keys.float(), entries.values.float(),
                                                    entries.log_multiplicity), ()), ())  # fmt: skip
    wanted_out, wanted_lse = reference(query.double(), rebuilt, scale, softcap)
    out, lse = (kernel or Triton()).attend(query, part, scale, **capping.keywords(softcap))
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    if not len(entries.keys):
        return
    # A logit errs by the rounding of its terms: of rebuilt keys to the query's dtype, else of sums in fp32.
    rounding = torch.finfo(dtype if encoder.name == "int8" else torch.float32).eps
    logit = scale * float(query.abs().amax((0, 1, 2)).double() @ rebuilt.keys.abs().amax(0).double()) * rounding
    logit += 0.0 if softcap is None else cap_tolerance(softcap)
    largest = 20 if softcap is None else 20 + softcap
    assert torch.allclose(lse.double(), wanted_lse, atol=logit + 4 * torch.finfo(torch.float32).eps * largest, rtol=0)
    # Weights move with the logits and are rounded to the query's dtype, as are the values that they weigh.
    largest = float(rebuilt.values.abs().max())
    assert float((out - wanted_out).abs().max()) <= largest * (2 * logit + 4 * torch.finfo(dtype).eps)


def test_the_kernel_matches_the_reference():
    pytest.importorskip("triton")
    # Triton decides when it is imported whether it interprets, so this takes a process of its own.
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(SHAPES) * 2 * 2 * (1 + len(LOGITS))), "checked"]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "block_m", "caps"),
    [
        ("dense", "fp32", 64, 16, False),
        ("dense", "bf16", 128, 64, False),
        ("int8", "bf16", 128, 16, False),
        ("int8", "bf16", 64, 16, False),
        ("dense", "fp32", 256, 16, True),
        ("dense", "bf16", 128, 64, True),
        ("int8", "bf16", 128, 16, True),
    ],
)
def test_the_kernel_builds_for_gpus_and_spills_nothing(capability, kind, dtype, dim, block_m, caps):
    pytest.importorskip("triton")
    from kvframe.ops.ragged_attention.triton import BLOCK_N, LOADERS, WARPS, attend_kernel

    codes = (f"*{dtype}",) * 2 if kind == "dense" else ("*i8", "*i8", "*bf16", "*bf16")
    signature = {"query": f"*{dtype}", "codes": codes, "offsets": "*i64", "scale": "fp32", "softcap": "fp32"}
    signature |= dict.fromkeys(("log_multiplicity", "out", "lse"), "*fp32")
    signature |= dict.fromkeys(("n_pairs", "n_queries", "split"), "i32")
    constants = {"LOAD": LOADERS[kind][0], "CAPS": caps, "WEIGHTED": True, "DIM": dim, "BLOCK_D": dim}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": BLOCK_N}
    made = build(attend_kernel, signature, constants, capability, num_warps=WARPS)
    assert made["spilled"] == 0, made


@pytest.mark.parametrize("capability", TARGETS)
def test_the_merge_builds_for_gpus_and_spills_nothing(capability):
    pytest.importorskip("triton")
    from kvframe.ops.ragged_attention.triton import merge_kernel

    signature = dict.fromkeys(("outs", "lses", "out", "lse"), "*fp32") | dict.fromkeys(("n_rows", "n_splits"), "i32")
    made = build(merge_kernel, signature, {"DIM": 128, "BLOCK_D": 128, "BLOCK_P": 16}, capability)
    assert made["spilled"] == 0, made


def test_refusals_name_the_way_out(monkeypatch):
    pytest.importorskip("triton")
    query, entries = make(1, 1, 1, 1, 8, 3, False, torch.float32)
    codes = Dense().encode(entries, ())
    foreign = Encoded(codes.offsets, codes.codes, "mine", codes.dtype)
    with pytest.raises(InputError, match=r"no loader for the format 'mine' .*use attention: auto"):
        Triton().attend(query, Part(foreign, Dense()), 1.0)
    strided = Encoded(codes.offsets, {**codes.codes, "keys": torch.zeros(8, 3).T}, "dense", codes.dtype)
    with pytest.raises(InputError, match="'keys' is not"):
        Triton().attend(query, Part(strided, Dense()), 1.0)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="runs on CUDA devices, but the query is on cpu"):
            Triton().attend(query, Part(codes, Dense()), 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoder", [Dense(), Int8()])
@pytest.mark.parametrize(("scale", "softcap"), LOGITS)
def test_the_kernel_on_a_gpu(shape, dtype, encoder, scale, softcap):
    check(shape, encoder, dtype, "cuda", scale=scale, softcap=softcap)


if __name__ == "__main__":
    from kvframe.ops.ragged_attention import triton as module

    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    count = 0
    # One program for each head, then several.
    for split, (scale, softcap) in ((module.SPLIT, LOGITS[0]), *((16, each) for each in LOGITS)):
        module.SPLIT = split
        for each in SHAPES:
            for coder in (Dense(), Int8()):
                # The interpreter's products know no bf16.
                for precision in (torch.float32, torch.float16):
                    check(each, coder, precision, scale=scale, softcap=softcap)
                    count += 1
    print(count, "checked")
