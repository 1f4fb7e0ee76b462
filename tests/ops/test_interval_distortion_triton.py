"""The Triton kernel of the interval tables: against the reference in the interpreter, and built for each target."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvframe.errors import InputError
from kvframe.ops import interval_distortion
from kvframe.rope import Rope

# units, tokens, probes, dim, rotary, longest, coherent
CASES = [(2, 5, 3, 8, 8, 4, True), (1, 5, 1, 12, 4, 5, False), (1, 1, 2, 4, 4, 3, True), (1, 2, 5, 8, 6, 2, True)]


def check_kernel(case, device="cpu"):
    units, tokens, probes, dim, rotary, longest, coherent = case
    generator = torch.Generator().manual_seed(tokens)
    rope = Rope(100.0 ** (-torch.arange(0, rotary, 2) / rotary), 1.25)
    shapes = [(units, tokens, dim), (units, tokens, dim), (units, probes, dim)]
    keys, values, queries = (torch.randn(*shape, generator=generator) + 1 for shape in shapes)
    keys[0, 0] = 6 * queries[0, 0]  # a sink
    weights = torch.rand(units, tokens, generator=generator)
    weights[0, : tokens // 2] = 0
    args = [x.to(device) for x in (keys, values, queries, weights)]
    wanted = interval_distortion(*args, rope, dim**-0.5, longest, coherent=coherent, impl="reference")
    got = interval_distortion(*args, rope, dim**-0.5, longest, coherent=coherent, impl="triton")
    possible = wanted.distortion.isfinite()
    assert torch.equal(got.distortion.isfinite(), possible)
    # As for the other implementations: distortions are shares of the attention.
    assert torch.allclose(got.distortion[possible].double(), wanted.distortion[possible], atol=1e-5, rtol=1e-4)
    assert torch.allclose(got.multiplicity.double(), wanted.multiplicity, atol=1e-4, rtol=1e-4)
    assert torch.allclose(got.mass.double(), wanted.mass, atol=1e-6)


def test_kernel_matches_the_reference():
    pytest.importorskip("triton")
    # Triton decides when it is imported whether it interprets, so this takes a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(CASES)), "checked"]


@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernel_builds_for_gpus(target):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvframe.ops.interval_distortion.triton import grow_kernel

    pointers = ("keys", "values", "probes", "share", "total", "weights", "cos", "sin", "distortion", "multiplicity")
    signature = dict.fromkeys(pointers, "*fp32")
    signature |= dict.fromkeys(("tokens", "longest", "lanes", "pairs", "dim"), "i32")
    signature |= dict.fromkeys(("mass_share", "base", "least", "eps", "limit"), "fp32")
    constants = {"COHERENT": True, "P": 16, "C": 64, "V": 128}
    ordered = {name: signature.get(name, "constexpr") for name in grow_kernel.arg_names}
    source = ASTSource(fn=grow_kernel, signature=ordered, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32))
    assert len(built.asm["cubin"]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the kernel runs")
def test_asked_for_by_name_it_does_not_fall_back(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = torch.randn(1, 3, 4)
    with pytest.raises(InputError, match="runs on a GPU, but the keys are on a CPU; use impl='auto'"):
        interval_distortion(row, row, row, torch.ones(1, 3), Rope(torch.ones(2)), 1.0, 2, impl="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_a_gpu():
    for case in [*CASES, (6, 1000, 16, 64, 64, 32, True)]:
        check_kernel(case, "cuda")


if __name__ == "__main__":
    for case in CASES:
        check_kernel(case)
    print(len(CASES), "checked")
