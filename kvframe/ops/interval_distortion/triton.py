"""The tables in one kernel: each program grows the intervals that begin at one token, straight from the definitions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.interval_distortion.tables import EPS, LEAST_MASS, LOGIT_LIMIT, IntervalTables
from kvframe.ops.launch import beside_its_tensors
from kvframe.rope import Rope


@triton.jit
def grow_kernel(
    keys,  # fp32 [U, N, 2, C] before RoPE, as pairs of channels
    values,  # fp32 [U, N, V]
    probes,  # fp32 [U, P, 2, C] as pairs of channels, times the scale
    share,  # fp32 [U, N, P]
    total,  # fp32 [U, P]
    weights,  # fp32 [U, N]
    cos,  # fp32 [N, C]
    sin,  # fp32 [N, C]
    distortion,  # fp32 [U, longest, N], out
    multiplicity,  # fp32 [U, longest, N], out
    tokens,
    longest,
    lanes,
    pairs,
    dim,
    mass_share,
    base,
    least,
    eps,
    limit,
    COHERENT: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
):
    """One program for one unit and one first token: adds a token, makes the entry, holds it against the sums."""
    begin, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, pair, channel = tl.arange(0, P), tl.arange(0, C), tl.arange(0, V)
    real, turns, inside = lane < lanes, pair < pairs, channel < dim
    at_probe = probes + ((unit * lanes + lane)[:, None] * 2) * pairs + pair[None, :]
    both = real[:, None] & turns[None, :]
    first_probe = tl.load(at_probe, mask=both, other=0.0)  # [P, C]
    second_probe = tl.load(at_probe + pairs, mask=both, other=0.0)
    norm_of_all = tl.load(total + unit * lanes + lane, mask=real, other=0.0)
    first_key, second_key = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    weighted, plain = tl.zeros([V], tl.float32), tl.zeros([V], tl.float32)
    mass, moment = tl.zeros([P], tl.float32), tl.zeros([P, V], tl.float32)
    weight_sum, norm_sum = 0.0, 0.0
    for length in range(1, longest + 1):
        token = begin + length - 1
        if token < tokens:
            row = unit * tokens + token
            one = tl.load(keys + row * 2 * pairs + pair, mask=turns, other=0.0)
            two = tl.load(keys + row * 2 * pairs + pairs + pair, mask=turns, other=0.0)
            value = tl.load(values + row * dim + channel, mask=inside, other=0.0)
            here = tl.load(share + row * lanes + lane, mask=real, other=0.0)
            weight = tl.load(weights + row)
            first_key += one
            second_key += two
            weighted += weight * value
            plain += value
            mass += here
            moment += here[:, None] * value[None, :]
            weight_sum += weight
            norm_sum += tl.sqrt(tl.sum(one * one + two * two, axis=0))
            count = length * 1.0
            coherence = tl.sum(first_key * first_key + second_key * second_key, axis=0)
            coherence = coherence / tl.maximum(norm_sum * norm_sum, eps)
            m = count
            if COHERENT:
                m = tl.minimum(tl.maximum(count * coherence, 1.0), count)
            place = begin + (length - 1) // 2
            c = tl.load(cos + place * pairs + pair, mask=turns, other=0.0)
            s = tl.load(sin + place * pairs + pair, mask=turns, other=0.0)
            key_one, key_two = (first_key * c - second_key * s) / count, (second_key * c + first_key * s) / count
            logit = tl.sum(first_probe * key_one[None, :] + second_probe * key_two[None, :], axis=1) - norm_of_all
            ours = m * tl.exp(tl.minimum(logit, limit))
            norm, lift = weight_sum * (1 + base), base * weight_sum / count
            blank = norm <= eps
            norm, lift = tl.where(blank, count, norm), tl.where(blank, 1.0, lift)
            merged = (weighted + lift * plain) / norm
            missing = moment - ours[:, None] * merged[None, :]
            of_moment = mass * tl.sum(missing * missing, axis=1) / tl.maximum(tl.sum(moment * moment, axis=1), eps)
            of_mass = (mass - ours) * (mass - ours) / tl.maximum(mass, least)
            lost = tl.where(real, mass_share * of_mass + (1 - mass_share) * of_moment, 0.0)
            out = (unit * longest + length - 1) * tokens + begin
            tl.store(distortion + out, tl.where(length == 1, 0.0, tl.sum(lost, axis=0) / lanes))
            tl.store(multiplicity + out, m)


@beside_its_tensors
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
    """Contract as `kvframe.ops.interval_distortion`, on a GPU (on a CPU under TRITON_INTERPRET=1). Raises InputError
    elsewhere."""
    if not keys.is_cuda and not triton.knobs.runtime.interpret:
        raise InputError(
            "interval_distortion's triton kernel runs on a GPU, but the keys are on a CPU; use impl='auto'."
        )
    units, tokens, dim = keys.shape
    lanes, longest = probes.shape[1], min(longest, tokens)
    keys, values, probes, weights = (x.float().contiguous() for x in (keys, values, probes, weights))
    probes = probes * scale
    logits = probes @ keys.mT  # [U, P, N]
    total = logits.logsumexp(-1)
    share = (logits - total[..., None]).exp()
    index = torch.arange(tokens, device=keys.device)
    # Channels beyond the rotary ones are paired as well and turn by nothing.
    half, rest = rope.inv_freq.shape[0], dim // 2 - rope.inv_freq.shape[0]
    columns = torch.arange(dim, device=keys.device)
    first = torch.cat([columns[:half], columns[2 * half : 2 * half + rest]])
    second = torch.cat([columns[half : 2 * half], columns[2 * half + rest :]])
    order = torch.cat([first, second])
    angle = index[:, None].float() * rope.inv_freq.to(keys.device)
    still = angle.new_zeros(tokens, rest)
    distortion = torch.full((units, longest, tokens), torch.inf, device=keys.device)
    multiplicity = torch.ones(units, longest, tokens, device=keys.device)
    grow_kernel[(tokens, units)](
        rope.unrotate(keys, index)[..., order].contiguous(),
        values,
        probes[..., order].contiguous(),
        share.mT.contiguous(),
        total.contiguous(),
        weights,
        torch.cat([angle.cos() * rope.scaling, still + 1], 1).contiguous(),
        torch.cat([angle.sin() * rope.scaling, still], 1).contiguous(),
        distortion,
        multiplicity,
        tokens,
        longest,
        lanes,
        dim // 2,
        dim,
        mass_share,
        base,
        LEAST_MASS,
        EPS,
        LOGIT_LIMIT,
        COHERENT=coherent,
        P=triton.next_power_of_2(lanes),
        C=triton.next_power_of_2(dim // 2),
        V=triton.next_power_of_2(dim),
    )
    return IntervalTables(distortion, multiplicity, share.mean(1))
