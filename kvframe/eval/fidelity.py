"""How far a compressed cache's predictions are from the full cache's. Pure functions on logits `[T, V]`: one row a
predicted token."""

from __future__ import annotations

from torch import Tensor


def kl_divergence(full: Tensor, logits: Tensor) -> Tensor:
    """KL(full || compressed) of each token in nats, fp32 `[T]`; rounding never makes it negative."""
    log_p, log_q = full.float().log_softmax(-1), logits.float().log_softmax(-1)
    # A token with probability 0 adds nothing; 0 * (-inf - x) would be NaN.
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill(log_p.exp() == 0, 0).sum(-1).clamp(min=0)


def top1_agreement(full: Tensor, logits: Tensor) -> Tensor:
    """Whether both find the same token most likely, bool `[T]`."""
    return full.argmax(-1) == logits.argmax(-1)


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each token in nats, fp32 `[T]`, for `targets` int64 `[T]`."""
    return -logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
