"""Divergence, agreement and likelihood against their definitions in fp64."""

from __future__ import annotations

import torch

from kvframe.eval import kl_divergence, negative_log_likelihood, top1_agreement


def logits(seed, tokens=7, vocabulary=13):
    return 4 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_kl_is_its_definition():
    p, q = logits(0).double().softmax(-1), logits(1).double().softmax(-1)
    torch.testing.assert_close(
        kl_divergence(logits(0), logits(1)).double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6
    )


def test_kl_is_zero_on_itself_and_never_negative():
    assert kl_divergence(logits(0), logits(0) + 3).max() < 1e-6
    nearly = logits(0) + 1e-6 * logits(1)
    assert kl_divergence(logits(0), nearly).min() >= 0


def test_kl_takes_forbidden_tokens():
    full, other = logits(0), logits(1)
    full[:, 3] = -torch.inf
    other[:, 3] = -torch.inf
    assert kl_divergence(full, other).isfinite().all()
    other[:, 4] = -torch.inf
    assert kl_divergence(full, other).isinf().all()


def test_half_precision_is_measured_in_single():
    assert kl_divergence(logits(0).bfloat16(), logits(1).bfloat16()).dtype == torch.float32


def test_agreement_and_likelihood():
    full, other = logits(0), logits(0)
    other[2] = -other[2]
    assert top1_agreement(full, other).tolist() == [True, True, False, True, True, True, True]
    targets = torch.arange(7)
    expected = torch.nn.functional.cross_entropy(full, targets, reduction="none")
    torch.testing.assert_close(negative_log_likelihood(full, targets), expected)
