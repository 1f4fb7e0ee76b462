"""The tables by the same recurrences as `fast`, compiled: one pass over intervals and probes instead of thirty."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.interval_distortion.fast import gram_band, turned_probes
from kvframe.ops.interval_distortion.tables import EPS, LEAST_MASS, LOGIT_LIMIT, IntervalTables
from kvframe.rope import Rope

# Tokens whose intervals are made together: what is alive for them should stay in a core's cache.
BLOCK = 512

_f = np.float32
_LOG2E, _EPS, _LEAST, _LIMIT = _f(np.log2(np.e)), _f(EPS), _f(LEAST_MASS), _f(LOGIT_LIMIT * np.log2(np.e))
_LOWEST = _f(-126)  # 2^-126 is the smallest normal number of fp32
_ONE, _TWO, _HALF, _ZERO = _f(1), _f(2), _f(0.5), _f(0)
# 2^x on [-1/2, 1/2]: the series of exp(x ln 2), whose next term is below 2^-24.
_C1, _C2, _C3, _C4, _C5, _C6 = (_f(np.log(2) ** k / np.prod(np.arange(1, k + 1.0))) for k in range(1, 7))


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
    """See `kvframe.ops.interval_distortion`. Raises InputError for tensors that are not on a CPU."""
    if keys.device.type != "cpu":
        raise InputError(f"interval_distortion's numba path runs on a CPU, but the keys are on {keys.device}.")
    units, tokens, _ = keys.shape
    longest = min(longest, tokens)
    distortion = torch.full((units, longest, tokens), torch.inf)
    multiplicity = torch.ones(units, longest, tokens)
    mass = torch.empty(units, tokens)
    index = torch.arange(tokens)
    threads = torch.get_num_threads()
    # The compiled part lets go of Python's lock, so plain threads share it out; what is alive grows with their number.
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, units, threads):
            jobs: list[tuple[Any, ...]] = []
            for unit in range(first, min(first + threads, units)):
                k, v, q, w = (x[unit].float() for x in (keys, values, probes, weights))
                q = q * scale
                plain = rope.unrotate(k, index)
                logits = q @ k.T  # [P, N]
                total = logits.logsumexp(-1)
                share = (logits - total[:, None]).exp()
                mass[unit] = share.mean(0)
                turned = turned_probes(q, longest, rope)  # [longest, P, D]
                for begin in range(0, tokens, BLOCK):
                    # Intervals that begin in the block, and the tokens that they reach.
                    starts, here = min(BLOCK, tokens - begin), slice(begin, min(begin + BLOCK + longest - 1, tokens))
                    reach = min(longest, here.stop - begin)
                    shifted = k[here] @ turned.flatten(0, 1).T  # [n, longest * P]
                    job = (
                        shifted.unflatten(-1, (longest, -1)).numpy(),
                        total.numpy(),
                        share[:, here].T.contiguous().numpy(),
                        w[here].contiguous().numpy(),
                        gram_band(v[None, here], reach)[0].numpy(),
                        gram_band(plain[None, here], reach)[0].numpy(),
                        starts,
                        _f(mass_share),
                        _f(base),
                        coherent,
                        distortion[unit, :, begin : begin + starts].numpy(),
                        multiplicity[unit, :, begin : begin + starts].numpy(),
                    )
                    if threads == 1:
                        _fill(*job)
                    else:
                        jobs.append(job)
            list(pool.map(lambda job: _fill(*job), jobs))
    return IntervalTables(distortion, multiplicity, mass)


def _compile(function: Any) -> Any:
    # Sums over probes may be reordered, so that lanes can be probes; infinities and NaN keep their meaning.
    options = {"nogil": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # There is no folder that the machine code could be kept in, so each process makes it anew.
        return numba.njit(**options)(function)


@_compile
def _fill(
    shifted: Any,  # [n, longest, P] logits of each key for the probes rotated by t - p = shift - (longest - 1) // 2
    total: Any,  # [P]
    share: Any,  # [n, P]
    weights: Any,  # [n]
    value_gram: Any,  # [longest', n], longest' = min(longest, n)
    key_gram: Any,  # [longest', n]
    starts: int,
    mass_share: Any,
    base: Any,
    coherent: bool,
    distortion: Any,  # [longest, starts], out
    multiplicity: Any,  # [longest, starts], out
) -> None:
    n, lanes = share.shape
    longest, still = len(value_gram), (shifted.shape[1] - 1) // 2
    # By start.
    mass, square, weighted, plain = share.copy(), np.empty_like(share), np.empty_like(share), np.empty_like(share)
    weight_sum, ww, w1 = weights.copy(), np.empty_like(weights), np.empty_like(weights)
    one, key_square, norm_sum = value_gram[0].copy(), key_gram[0].copy(), np.sqrt(key_gram[0])
    norms = norm_sum.copy()
    # By end: sums over the interval before it of what the last token adds.
    cross = np.zeros_like(share)
    weight_cross, plain_cross, key_cross = np.zeros_like(weights), np.zeros_like(weights), np.zeros_like(weights)
    # By the middle position, for odd and for even lengths: sums of shifted logits.
    centre = np.zeros((2, n, lanes), np.float32)
    for t in range(n):
        ww[t], w1[t] = weights[t] * weights[t] * one[t], weights[t] * one[t]
        for lane in range(lanes):
            own = share[t, lane] * value_gram[0, t]
            square[t, lane], weighted[t, lane], plain[t, lane] = share[t, lane] * own, weights[t] * own, own
            centre[0, t, lane] = shifted[t, still, lane]
    for a in range(starts):
        distortion[0, a] = _ZERO
    power = np.empty(lanes, np.float32)
    bits = np.empty(lanes, np.int32)
    scales = bits.view(np.float32)
    for length in range(2, longest + 1):
        count = _f(length)
        right, left = length // 2, (length - 1) // 2
        odd = (length - 1) % 2
        for a in range(n - length + 1):
            b, p = a + length - 1, a + left
            gram, gram0, w = value_gram[length - 1, a], value_gram[0, b], weights[b]
            weight_cross[b] += weights[a] * gram
            plain_cross[b] += gram
            key_cross[b] += key_gram[length - 1, a]
            of_weight, of_plain = weight_cross[b] + w * gram0, plain_cross[b] + gram0
            ww[a] += w * (weight_cross[b] + of_weight)
            w1[a] += weight_cross[b] + w * of_plain
            one[a] += plain_cross[b] + of_plain
            key_square[a] += _TWO * key_cross[b] + key_gram[0, b]
            norm_sum[a] += norms[b]
            weight_sum[a] += w
            m = count
            if coherent:
                m = count * max(key_square[a], _ZERO) / max(norm_sum[a] * norm_sum[a], _EPS)
                m = min(max(m, _ONE), count)
            # The merged value is (sum w v + lift * sum v) / norm; with all weights 0 it is the plain mean.
            norm, lift = weight_sum[a] * (_ONE + base), base * weight_sum[a] / count
            if norm <= _EPS:
                norm, lift = count, _ONE
            value_square = max(ww[a] + lift * (_TWO * w1[a] + lift * one[a]), _ZERO) / (norm * norm)
            factor, per_token = -_TWO / norm, _ONE / count
            for lane in range(lanes):
                logit = centre[odd, p, lane] + shifted[b, still + right, lane] + shifted[a, still - left, lane]
                centre[odd, p, lane] = logit
                logit = min(max((logit * per_token - total[lane]) * _LOG2E, _LOWEST), _LIMIT)
                whole = np.floor(logit + _HALF)
                x = logit - whole
                power[lane] = _ONE + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
                bits[lane] = (np.int32(whole) + np.int32(127)) << np.int32(23)
            of_mass, of_moment = _ZERO, _ZERO
            for lane in range(lanes):
                new = share[b, lane]
                crossing = cross[b, lane] + share[a, lane] * gram
                cross[b, lane] = crossing
                z = mass[a, lane] + new
                mass[a, lane] = z
                s = square[a, lane] + new * (_TWO * crossing + new * gram0)
                square[a, lane] = s
                by_weight = weighted[a, lane] + crossing * w + new * of_weight
                weighted[a, lane] = by_weight
                evenly = plain[a, lane] + crossing + new * of_plain
                plain[a, lane] = evenly
                ours = m * power[lane] * scales[lane]
                # Z |M - M'|^2 / |M|^2 = Z + Z (Z'^2 |v'|^2 - 2 Z' M.v') / |M|^2
                rest = ours * (ours * value_square + factor * (by_weight + lift * evenly))
                of_moment += z + z * rest / max(s, _EPS)
                of_mass += (ours - z) * (ours - z) / max(z, _LEAST)
            if a < starts:
                multiplicity[length - 1, a] = m
                of_moment = max(of_moment, _ZERO)
                distortion[length - 1, a] = (mass_share * of_mass + (_ONE - mass_share) * of_moment) / _f(lanes)
