"""What some models do with their logits q.k * scale: cap them, and let a sink share in the softmax."""

from __future__ import annotations

from torch import Tensor


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits within plus and minus `softcap`: `softcap * tanh(logits / softcap)`; None = as they are."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def attention_weights(logits: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The softmax over the last dimension of `logits [..., n]`, which are capped and masked already.

    `sinks`, which broadcast to `[...]`, are the logits of one more term without a value: the weights then sum to less
    than 1. None = there is none."""
    weights = logits.softmax(-1)
    return weights if sinks is None else weights * (logits.logsumexp(-1) - sinks).sigmoid()[..., None]
