"""Tolerances, derived from the precision and the length of what was computed; nothing here was tuned."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.types import Entries, Observation

FP32 = torch.finfo(torch.float32).eps


def sum_tolerance(length: int, size: float, eps: float = FP32) -> float:
    """Bound on how far two sums of `length` products may differ when they are added up in different order: each is
    within `length * eps / 2 * size` of the exact one, `size` being the sum of the magnitudes."""
    return length * eps * size


def logit_tolerance(query_norm: float, key_norm: float, scale: float, dim: int) -> float:
    """The same for a logit q.k * scale over `dim` channels: the magnitudes add up to at most |q| |k| scale."""
    return sum_tolerance(dim + 2, query_norm * key_norm * scale)


def attention_tolerance(query: Tensor, entries: Entries, scale: float, coded: bool = False) -> tuple[float, float]:
    """`(out, lse)` tolerances for attention whose logits and sums are formed in fp32 and whose probabilities and
    results may be rounded to the dtype of the keys: a softmax moves by twice its logits' error, relatively; the
    weighted sum over n entries adds n roundings, and the dtype two of its own. `coded`: the entries were decoded,
    and so rounded to their dtype, which attention to their codes need not do: each key is off by half a unit."""
    if not len(entries.keys):
        return 0.0, 0.0
    n = max(end - begin for begin, end in zip(entries.bounds, entries.bounds[1:], strict=False))
    norm, dim = float(query.float().norm(dim=-1).max()), query.shape[-1]
    longest, low = float(entries.keys.float().norm(dim=-1).max()), torch.finfo(entries.keys.dtype).eps
    logit = logit_tolerance(norm, longest, scale, dim) + coded * norm * longest * scale * low / 2
    logit += FP32 * (0.0 if entries.log_multiplicity is None else float(entries.log_multiplicity.abs().max()))
    largest = float(entries.values.float().abs().max())
    out = largest * (2 * logit + (n + 4) * FP32 + 2 * low)
    # A sum of probabilities that were rounded to the dtype is off by half a unit of it, and so is its logarithm.
    return out, logit + (n + 4) * FP32 + low / 2


def score_tolerance(scores: Tensor, observation: Observation) -> float:
    """For scores made of attention: logits over D channels, a softmax, sums over T tokens, all in fp32. Other scores
    are made of less."""
    queries = [layer.queries for layer in observation.layers if layer.queries is not None]
    norm = max((float(q.float().norm(dim=-1).max()) for q in queries), default=1.0)
    keys = max(float(layer.keys.float().norm(dim=-1).max()) for layer in observation.layers)
    logit = logit_tolerance(norm, keys, observation.model.scale, observation.model.head_dim)
    largest = float(scores.abs().max()) if scores.numel() else 0.0
    return largest * (2 * logit + 4 * observation.shape[-1] * FP32) + FP32**2


def logits_tolerance(logits: Tensor, layers: int, hidden: int, tokens: int) -> float:
    """For a model's logits: each layer adds up over the hidden channels and over the tokens, twice over, and the error
    of one enters the next."""
    return float(logits.abs().max()) * 2 * layers * (hidden + tokens) * FP32
