"""Soft matching: the reference against loops, the kernel against the reference, and the kernel built for each GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import InputError, StageError
from kvframe.ops import soft_matching
from kvframe.ops.soft_matching.reference import TIE

METRICS = ["cosine", "distance", "ward"]
CASES = st.fixed_dictionaries(
    {
        "chunks": st.integers(0, 4),
        "sources": st.sampled_from([0, 1, 2, 7, 33]),
        "targets": st.sampled_from([0, 1, 2, 7, 33, 65]),
        "dim": st.sampled_from([1, 3, 16, 40]),
        "seed": st.integers(0, 10**6),
        "repeats": st.booleans(),
    }
)


def make(chunks, sources, targets, dim, seed, repeats, dtype=torch.float64):
    """Rows, with repeats and a row of zeros among them, and sides with holes anywhere."""
    generator = torch.Generator().manual_seed(seed)
    total = chunks * (sources + targets) + 1
    rows = torch.randn(total, dim, generator=generator, dtype=torch.float64)
    if repeats:
        rows = rows[torch.randint(0, max(1, total // 3), (total,), generator=generator)]
    rows[torch.randint(0, total, (), generator=generator)] = 0
    counts = torch.randint(1, 9, (total,), generator=generator).double()
    order = torch.randperm(total, generator=generator)[: total - 1]
    a, b = order.split([chunks * sources, chunks * targets])
    holes = [torch.rand(len(x), generator=generator) < 0.2 for x in (a, b)]
    a, b = (torch.where(hole, -1, x) for hole, x in zip(holes, (a, b), strict=True))
    return rows.to(dtype), a.view(chunks, sources), b.view(chunks, targets), counts.to(dtype)


def likeness_of(rows, counts, i, j, metric):
    """One likeness, spelled out in fp64, and the slack within which it is a tie."""
    a, b = rows[i].double(), rows[j].double()
    if metric == "cosine":
        size = float(a.norm() * b.norm())
        return (float(a @ b) / size if size else 0.0), TIE
    distance, slack = -float((a - b).square().sum()), TIE * float(a.square().sum())
    if metric == "distance":
        return distance, slack
    n, m = float(counts[i]), float(counts[j])
    return distance * n * m / (n + m), slack * n


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=60, deadline=None)
@given(case=CASES)
def test_reference_is_a_search(metric, case):
    rows, sources, targets, counts = make(**case)
    likeness, partner = soft_matching(rows, sources, targets, metric, counts, impl="reference")
    assert likeness.shape == partner.shape == sources.shape
    for chunk, line in enumerate(sources.tolist()):
        candidates = [j for j in targets[chunk].tolist() if j >= 0]
        for slot, i in enumerate(line):
            got, found = float(likeness[chunk, slot]), int(partner[chunk, slot])
            if i < 0 or not candidates:
                assert (got, found) == (-torch.inf, -1)
                continue
            scores = [likeness_of(rows, counts, i, j, metric) for j in candidates]
            best = max(score for score, _ in scores)
            # fp64 rounds off far less than a tie's slack, so the first tie is the same.
            assert found == next(
                j for j, (score, slack) in zip(candidates, scores, strict=True) if score >= best - slack
            )
            # |a|^2 + |b|^2 - 2ab cancels: the error is relative to the squared norms, not to the distance.
            size = 1 if metric == "cosine" else 16 * float(rows[i].square().sum() + rows[found].square().sum())
            assert abs(got - best) <= 64 * torch.finfo(torch.float64).eps * max(size, 1)


def test_ties_go_to_the_first_target():
    rows = torch.randn(1, 64).expand(9, 64)
    for metric in METRICS:
        likeness, partner = soft_matching(
            rows * 3, torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 8, 5, 6]]), metric, torch.ones(9)
        )
        assert partner.tolist() == [[8, 8, 8]]
        # Equal rows: the cosine is 1 up to rounding, a distance 0 up to rounding of the squared norm.
        ceiling, size = (1, 1) if metric == "cosine" else (0, float((rows[0] * 3).square().sum()))
        assert (likeness <= ceiling).all()
        assert (ceiling - likeness <= 32 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("metric", METRICS)
def test_width_of_the_sides_does_not_matter(metric):
    rows, sources, targets, counts = make(4, 7, 33, 40, 5, True, torch.float32)
    narrow = soft_matching(rows, sources, targets, metric, counts)
    wide = soft_matching(
        rows,
        torch.nn.functional.pad(sources, (0, 26), value=-1),
        torch.nn.functional.pad(targets, (0, 71), value=-1),
        metric,
        counts,
    )
    assert torch.equal(wide[1][:, :7], narrow[1])
    assert (wide[1][:, 7:] == -1).all()


def test_bad_arguments():
    rows, sides = torch.randn(4, 3), torch.tensor([[0, 1]])
    with pytest.raises(InputError, match="no metric 'dot'; there are: cosine, distance, ward"):
        soft_matching(rows, sides, sides, "dot")
    with pytest.raises(InputError, match="no implementation 'cuda'; there are: auto, reference, triton"):
        soft_matching(rows, sides, sides, impl="cuda")
    with pytest.raises(InputError, match="needs counts for the metric 'ward'"):
        soft_matching(rows, sides, sides, "ward")
    with pytest.raises(StageError, match=r"targets must have shape \[1, any\]"):
        soft_matching(rows, sides, sides.expand(2, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the kernel runs")
def test_an_implementation_asked_for_by_name_does_not_fall_back(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, sides = torch.randn(4, 3), torch.tensor([[0, 1]])
    with pytest.raises(InputError, match="runs on a GPU, but the rows are on a CPU"):
        soft_matching(rows, sides, sides, impl="triton")
    with pytest.raises(InputError, match=r"takes fp32 rows, not torch.float64"):
        soft_matching(rows.double(), sides, sides, impl="triton")


SHAPES = [(1, 1, 1, 1), (3, 7, 33, 16), (2, 33, 2, 40), (2, 40, 65, 80), (0, 3, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8)]


def check_kernel(metric: str, shape: tuple[int, int, int, int], device: str = "cpu") -> None:
    """The kernel against the reference."""
    made = make(*shape, 3, True, torch.float32)
    rows, sources, targets, counts = (tensor.to(device) for tensor in made)
    wanted, partner = soft_matching(rows, sources, targets, metric, counts, impl="reference")
    likeness, found = soft_matching(rows, sources, targets, metric, counts, impl="triton")
    assert likeness.dtype == torch.float32
    assert found.dtype == torch.int64
    assert torch.equal(likeness.isinf(), wanted.isinf())
    # Sums of D products, each rounded once, in another order; counts are at most 8.
    size = 1.0 if metric == "cosine" else 2 * 8 * float(rows.square().sum(-1).max())
    difference = (likeness - wanted)[~wanted.isinf()].abs()
    assert (difference <= (shape[3] + 8) * torch.finfo(torch.float32).eps * size).all()
    # A tie's slack is many times that error, so both take the same target.
    assert torch.equal(found, partner)


def test_kernel_matches_the_reference():
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
    assert done.stdout.split() == [str(len(METRICS) * len(SHAPES)), "checked"]


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("metric", [0, 1, 2])
def test_kernel_builds_for_gpus(target, metric):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvframe.ops.soft_matching.triton import match_kernel

    signature = dict.fromkeys(("rows", "counts", "likeness"), "*fp32")
    signature |= dict.fromkeys(("sources", "targets", "partner"), "*i64")
    signature |= dict.fromkeys(("n_sources", "n_targets", "dim"), "i32") | {"tie": "fp32"}
    constants = {"METRIC": metric, "BLOCK": 32, "BLOCK_D": 128}
    ordered = {name: signature.get(name, "constexpr") for name in match_kernel.arg_names}
    source = ASTSource(fn=match_kernel, signature=ordered, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32))
    assert len(built.asm["cubin"]) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_a_gpu():
    for metric, shape in itertools.product(METRICS, SHAPES):
        check_kernel(metric, shape, "cuda")


if __name__ == "__main__":
    cases = list(itertools.product(METRICS, SHAPES))
    for case in cases:
        check_kernel(*case)
    print(len(cases), "checked")
