"""The bases, in fp64, against the paper's construction and against what they claim."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvframe_aatc.transform import block_diagonal, pca, query_weighted, rotation_average, whitened_svd


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("hidden", "channels"), [(24, 8), (16, 16), (12, 5)])
def test_pca_has_the_vectors_of_the_whitened_svd(hidden, channels):
    x = draw(400, hidden) @ draw(hidden, hidden, seed=1)
    weight = draw(hidden, channels, seed=2)
    a, b = whitened_svd(x, weight)
    keys = x @ weight
    basis = pca(keys.T @ keys / len(keys))
    size = float(weight.abs().max())
    assert (a @ b - weight).abs().max() < 1e-10 * size, "A B = W at full rank"
    latent = x @ a
    singular = basis.energy.sqrt()
    second = latent.T @ latent / len(latent)
    assert (second - torch.diag(singular)).abs().max() < 1e-10 * singular.max(), "E[h h^T] = S"
    directions = b / b.norm(dim=1, keepdim=True)
    sign = (directions * basis.synthesis).sum(1, keepdim=True).sign()
    assert (directions - sign * basis.synthesis).abs().max() < 1e-10


def test_pca_inverts_and_tells_energies():
    rows = draw(300, 7) @ draw(7, 7, seed=1)
    basis = pca(rows.T @ rows / 300)
    latent = rows @ basis.analysis.T
    assert torch.allclose(latent @ basis.synthesis, rows, atol=1e-12 * float(rows.abs().max()) * 7)
    assert torch.allclose(latent.square().mean(0), basis.energy, rtol=1e-10)
    assert bool((basis.energy.diff() <= 0).all()), "the channel of most energy comes first"


def test_the_query_weighted_basis_makes_the_query_error_a_plain_one():
    keys, queries = draw(300, 9) @ draw(9, 9, seed=1), draw(200, 9, seed=2) @ draw(9, 9, seed=3)
    weight = queries.T @ queries / 200
    basis = query_weighted(keys.T @ keys / 300, weight)
    assert (basis.analysis @ basis.synthesis.T - torch.eye(9)).abs().max() < 1e-9
    error = draw(50, 9, seed=4)
    expected = ((error @ weight) * error).sum(1)
    found = (error @ basis.analysis.T).square().sum(1)
    # The jitter lifts M by a billionth of its mean.
    assert torch.allclose(found, expected, rtol=1e-6)
    latent = keys @ basis.analysis.T
    second = latent.T @ latent / 300
    assert (second - torch.diag(basis.energy)).abs().max() < 1e-8 * basis.energy.max(), "channels are uncorrelated"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_singular_query_moment_still_gives_a_basis(rank):
    some = draw(rank, 6) if rank else torch.zeros(1, 6, dtype=torch.float64)
    basis = query_weighted(torch.eye(6, dtype=torch.float64), some.T @ some)
    assert bool(basis.analysis.isfinite().all())
    assert (basis.analysis @ basis.synthesis.T - torch.eye(6)).abs().max() < 1e-6


def test_the_rotation_average_is_the_mean_over_all_angles():
    dim, rotated, heads = 6, 4, 2
    rows = draw(heads, 30, dim)
    moment = rows.transpose(1, 2) @ rows / 30
    total = torch.zeros_like(moment)
    steps = torch.arange(8, dtype=torch.float64) * torch.pi / 4
    for first, second in itertools.product(steps, steps):
        turn = torch.eye(dim, dtype=torch.float64)
        for pair, angle in enumerate((first, second)):
            i, j = pair, pair + rotated // 2
            turn[i, i] = turn[j, j] = angle.cos()
            turn[i, j], turn[j, i] = -angle.sin(), angle.sin()
        total += turn.T @ moment @ turn
    average = total / 64
    found = rotation_average(moment, rotated)
    own = slice(rotated, dim)
    rest = average[:, own, own].clone()
    assert torch.allclose(found.diagonal(dim1=1, dim2=2), average.diagonal(dim1=1, dim2=2), atol=1e-12)
    average[:, own, own] -= rest - torch.diag_embed(rest.diagonal(dim1=1, dim2=2))
    assert torch.allclose(found, average, atol=1e-12), "but for the correlations of channels that do not rotate"


def test_blocks_stand_on_the_diagonal():
    blocks = draw(3, 2, 2)
    matrix = block_diagonal(blocks)
    assert torch.equal(matrix[2:4, 2:4], blocks[1])
    assert float(matrix.square().sum()) == pytest.approx(float(blocks.square().sum()))
