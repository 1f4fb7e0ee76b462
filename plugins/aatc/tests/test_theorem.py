"""Theorem 1 by Monte Carlo: the error of an attention output is the sum of a key term and a value term."""

from __future__ import annotations

import torch

DIM, TOKENS, HIDDEN, DRAWS = 8, 12, 10, 20000


def test_theorem_one_with_scaled_logits():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, keys, values, output = draw(DIM), draw(TOKENS, DIM), draw(TOKENS, DIM), draw(DIM, HIDDEN)
    key_noise, value_noise = 0.05 * torch.rand(DIM, generator=generator, dtype=torch.float64) + 0.01, 0.05
    value_noise = value_noise * torch.rand(DIM, generator=generator, dtype=torch.float64) + 0.01

    def attend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (k @ query / DIM**0.5).softmax(-1)  # [..., T]
        return (weights[..., None] * v).sum(-2) @ output, weights

    exact, weights = attend(keys, values)
    noisy, _ = attend(keys + key_noise * draw(DRAWS, TOKENS, DIM), values + value_noise * draw(DRAWS, TOKENS, DIM))
    errors = (noisy - exact).square().sum(-1)
    away = (values @ output - exact).square().sum(-1)  # [T]
    key_term = (weights.square() * away).sum() * (query.square() * key_noise.square()).sum() / DIM
    value_term = weights.square().sum() * (value_noise.square() * output.square().sum(-1)).sum()
    # Three standard errors of the mean, and the next order of the expansion, relative in the noise's square.
    rest = 3 * errors.std() / DRAWS**0.5 + errors.mean() * 10 * float((key_noise.square() * query.square()).sum()) / DIM
    assert abs(errors.mean() - key_term - value_term) < rest
    assert rest < 0.05 * errors.mean(), "tight enough to notice a missing 1/d"
