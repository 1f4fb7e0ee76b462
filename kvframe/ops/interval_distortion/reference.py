"""The specification: one interval after the other, in fp64, straight from the definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops.interval_distortion.tables import EPS, LEAST_MASS, LOGIT_LIMIT, IntervalTables
from kvframe.rope import Rope


def interval_distortion(
    keys: Tensor,
    values: Tensor,
    probes: Tensor,
    weights: Tensor,
    rope: Rope,
    scale: float,
    longest: int,
    mass_share: float = 0.25,
    base: float = 0.1,
    coherent: bool = True,
) -> IntervalTables:
    """See `kvframe.ops.interval_distortion`."""
    units, tokens, _ = keys.shape
    longest = min(longest, tokens)
    keys, values, probes, weights = (x.double() for x in (keys, values, probes, weights))
    index = torch.arange(tokens, device=keys.device)
    plain = rope.unrotate(keys, index)
    distortion = keys.new_full((units, longest, tokens), torch.inf)
    multiplicity = keys.new_ones(units, longest, tokens)
    logits = probes @ keys.mT * scale  # [U, P, N]
    total = logits.logsumexp(-1, keepdim=True)
    share = (logits - total).exp()  # [U, P, N], the probes' attention within the region
    for length in range(1, longest + 1):
        for begin in range(tokens - length + 1):
            inside = slice(begin, begin + length)
            mean = plain[:, inside].mean(1)  # [U, D]
            norm = plain[:, inside].norm(dim=-1).mean(1)
            coherence = (mean.norm(dim=-1) / norm.clamp_min(EPS)).clamp_max(1)
            count = length * coherence.square() if coherent else torch.full_like(coherence, length)
            multiplicity[:, length - 1, begin] = count.clamp(1, length)
            if length == 1:
                distortion[:, 0, begin] = 0
                continue
            where = torch.tensor([begin + (length - 1) // 2], device=keys.device)
            key = rope.rotate(mean[:, None], where)[:, 0]
            weight = weights[:, inside]
            weight = weight + base * weight.mean(-1, keepdim=True)
            blank = weight.sum(-1, keepdim=True) <= EPS
            weight = torch.where(blank, torch.ones_like(weight), weight)
            value = (weight[..., None] * values[:, inside]).sum(1) / weight.sum(-1, keepdim=True)  # [U, D]
            mass = share[..., inside].sum(-1)  # [U, P]
            moment = share[..., inside] @ values[:, inside]  # [U, P, D]
            logit = ((probes @ key[..., None])[..., 0] * scale - total[..., 0]).clamp_max(LOGIT_LIMIT)
            mass_ours = logit.exp() * multiplicity[:, length - 1, begin, None]
            moment_ours = mass_ours[..., None] * value[:, None]
            of_mass = (mass - mass_ours).square() / mass.clamp_min(LEAST_MASS)
            of_moment = mass * (moment - moment_ours).square().sum(-1) / moment.square().sum(-1).clamp_min(EPS)
            lost = mass_share * of_mass + (1 - mass_share) * of_moment
            distortion[:, length - 1, begin] = lost.mean(-1)
    return IntervalTables(distortion, multiplicity, share.mean(1))
