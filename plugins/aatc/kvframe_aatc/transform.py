"""Bases in which the channels of keys and values are decorrelated (AATC, section on the transform; methods.md 2.2).

A basis is a pair of matrices: `analysis [C, E]` gives the latent `h = analysis @ x` of a vector `x [E]`, and `synthesis
[C, E]` gives it back, `x = synthesis.T @ h`; `C = E` channels, the one of most energy first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to the mean of the diagonal: far above rounding in fp64, far below any channel that is worth a bit.
JITTER = 1e-9


@dataclass(frozen=True, eq=False)
class Basis:
    """`analysis`, `synthesis` and `energy [C]`, the second moment of each channel; fp64."""

    analysis: Tensor
    synthesis: Tensor
    energy: Tensor


def pca(moment: Tensor) -> Basis:
    """The orthonormal eigenbasis of a second moment `E[x x^T]`, `[E, E]`. With uncentred moments of bias-free keys it
    has the right singular vectors of the paper's whitened weight (Proposition 1)."""
    energy, vectors = torch.linalg.eigh(symmetric(moment))
    vectors, energy = vectors.flip(-1).T.contiguous(), energy.flip(-1).clamp_min(0)
    return Basis(vectors, vectors, energy)


def query_weighted(moment: Tensor, queries: Tensor, seen: int | None = None) -> Basis:
    """The basis in which the query-weighted error of keys is the plain squared one (NOVA-KV, arXiv 2608.04074).

    With `queries` `M = sum E[q q^T]` and the eigenvectors of `M^1/2 S M^1/2 = E Λ E^T`, the latent is `E^T M^1/2 k`,
    and `|h - h'|^2 = (k - k')^T M (k - k')`. A singular `M` is lifted by a billionth of its mean; where it is known how
    many tokens' queries were `seen`, by the square of one in as many and one, if that is more: what a few queries did
    not look at the next ones may, and a key's error there must not grow beyond measure."""
    weight = symmetric(queries)
    mean = weight.diagonal().mean()
    if not bool(mean > 0):
        return pca(moment)
    values, vectors = torch.linalg.eigh(weight)
    values = values.clamp_min(0) + max(JITTER, 0.0 if seen is None else (1 + seen) ** -2) * mean
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors / values.sqrt()) @ vectors.T
    rotated = pca(root @ moment.to(root) @ root)
    return Basis(rotated.analysis @ root, rotated.analysis @ inverse, rotated.energy)


def whitened_svd(activations: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's construction `W = A B` from activations `X [T, hidden]` and `W [hidden, E]`: returns `A [hidden, C]`
    and `B [C, E]`. Kept as the specification that `pca` is held against: `B`'s rows are its vectors times the roots of
    its standard deviations.

    From `X^T X / T = L L^T` and the SVD `L^T W = U S P^T`: `A = L^-T U S^1/2`, `B = S^1/2 P^T` (section 3 of the
    paper)."""
    covariance = activations.T @ activations / activations.shape[0]
    lower = torch.linalg.cholesky(covariance)
    left, singular, right = torch.linalg.svd(lower.T @ weight, full_matrices=False)
    root = singular.sqrt()
    return torch.linalg.solve_triangular(lower.T, left * root, upper=True), root[:, None] * right


def rotation_average(queries: Tensor, rotated: int) -> Tensor:
    """`E[R^T q q^T R]` over uniformly distributed relative positions, for `E[q q^T] [H, D, D]`: diagonal, the two
    channels of a RoPE pair sharing their energy (channels `i` and `i + rotated / 2`); channels from `rotated` on keep
    theirs."""
    energy = queries.diagonal(dim1=-2, dim2=-1).clone()
    half = rotated // 2
    pair = (energy[..., :half] + energy[..., half:rotated]) / 2
    energy[..., :half], energy[..., half:rotated] = pair, pair
    return torch.diag_embed(energy)


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part in fp64, so that rounding in a sum cannot turn eigenvalues complex."""
    matrix = matrix.double()
    return (matrix + matrix.T) / 2


def block_diagonal(blocks: Tensor) -> Tensor:
    """`[n, D, D]` as `[n * D, n * D]`: what several heads' queries see of their joint key."""
    return torch.block_diag(*blocks.unbind(0))
