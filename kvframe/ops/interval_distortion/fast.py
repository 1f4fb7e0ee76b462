"""The tables by recurrences: interval length by interval length, for all starts, probes and units at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvframe.ops.interval_distortion.tables import EPS, LEAST_MASS, LOGIT_LIMIT, IntervalTables
from kvframe.rope import Rope

# Numbers in one working array. About ten arrays are alive: on a CPU they should stay near.
CPU_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 24
_ROWS = 64  # rows of a Gram matrix formed at a time


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
    distortion = torch.full((units, longest, tokens), torch.inf, device=keys.device)
    multiplicity = torch.ones(units, longest, tokens, device=keys.device)
    mass = torch.empty(units, tokens, device=keys.device)
    block = CPU_BLOCK if keys.device.type == "cpu" else DEVICE_BLOCK
    step = max(1, block // max(1, probes.shape[1] * tokens))
    for begin in range(0, units, step):
        now = slice(begin, begin + step)
        chunk = Inputs(*(x[now].float() for x in (keys, values, probes, weights)))
        _fill(chunk, rope, scale, mass_share, base, coherent, distortion[now], multiplicity[now], mass[now])
    return IntervalTables(distortion, multiplicity, mass)


class Inputs(NamedTuple):
    """The tensors of some units, fp32; see `kvframe.ops.interval_distortion`."""

    keys: Tensor
    values: Tensor
    probes: Tensor
    weights: Tensor


def _fill(
    inputs: Inputs,
    rope: Rope,
    scale: float,
    mass_share: float,
    base: float,
    coherent: bool,
    distortion: Tensor,
    multiplicity: Tensor,
    mass_out: Tensor,
) -> None:
    """One chunk of units. All sums grow by adding a token, never by taking differences of prefix sums: beside a token
    that draws nearly all attention, these would lose every digit."""
    keys, values, probes, weights = inputs
    tokens, longest = keys.shape[1], distortion.shape[1]
    probes = probes * scale
    logits = probes @ keys.mT  # [U, P, N]
    total = logits.logsumexp(-1, keepdim=True)
    share = (logits - total).exp()  # [U, P, N]
    mass_out.copy_(share.mean(1))
    distortion[:, 0] = 0
    if longest == 1:
        return
    index = torch.arange(tokens, device=keys.device)
    plain = rope.unrotate(keys, index)
    key_gram, value_gram = gram_band(plain, longest), gram_band(values, longest)  # [U, longest, N]
    # A merged key is the mean of R(p - t) k_t, so its logit is the mean of (R(t - p) q) . k_t: only `longest` different
    # rotations of the probes occur, and no merged key need be formed.
    shifts = torch.arange(-((longest - 1) // 2), longest // 2 + 1, device=keys.device)  # t - p
    turned = Rope(rope.inv_freq).rotate(probes[:, None], shifts[:, None]).flatten(1, 2)  # [U, shifts * P, D]
    shifted = (turned @ keys.mT).unflatten(1, (len(shifts), -1))  # [U, shifts, P, N]
    zero_shift = (longest - 1) // 2
    # Sums of shifted logits by the middle position p, for odd and for even lengths.
    by_centre = [logits.clone(), torch.zeros_like(share)]

    norms = plain.norm(dim=-1)
    # Per unit, by start: sums over the interval, and over its pairs of tokens.
    norm_sum, weight_sum = norms.clone(), weights.clone()
    key_square = key_gram[:, 0].clone()
    ww, w1, one = weights.square() * value_gram[:, 0], weights * value_gram[:, 0], value_gram[:, 0].clone()
    # Per unit, by end b: sums over the interval before b of what token b adds.
    key_cross, weight_cross, plain_cross = (torch.zeros_like(norms) for _ in range(3))
    # Per probe, by start: mass, |M|^2, M . (weighted sum of values), M . (plain sum of values).
    diagonal = value_gram[:, 0, None]  # [U, 1, N]
    mass = share.clone()
    own = share * diagonal
    square, with_weighted, with_plain = share * own, weights[:, None] * own, own
    cross = torch.zeros_like(share)  # by end b: sum over the interval before b of share_t v_t . v_b
    double, minus_total, total_mass = 2 * share, -total, mass_out.clone()
    for length in range(2, longest + 1):
        reach, n = length - 1, tokens - length + 1
        # Token b = a + reach joins [a, b); `reach` tokens stand before it.
        old, new = slice(0, n), slice(reach, tokens)
        gram, gram0 = value_gram[:, reach, :n], diagonal[..., new]
        key_cross[:, new] += key_gram[:, reach, :n]
        weight_cross[:, new] += weights[:, old] * gram
        plain_cross[:, new] += gram
        cross[..., new].addcmul_(share[..., old], gram[:, None])
        w_new, crossing, share_new = weights[:, new], cross[..., new], share[..., new]
        mass[..., old] += share_new
        total_mass[:, old] += mass_out[:, new]
        square[..., old].addcmul_(double[..., new], crossing).addcmul_(share_new, share_new * gram0)
        with_weighted[..., old].addcmul_(crossing, w_new[:, None])
        with_weighted[..., old].addcmul_(share_new, (weight_cross[:, new] + w_new * gram0[:, 0])[:, None])
        with_plain[..., old].add_(crossing).addcmul_(share_new, (plain_cross[:, new] + gram0[:, 0])[:, None])
        ww[:, old] += w_new * (2 * weight_cross[:, new] + w_new * gram0[:, 0])
        w1[:, old] += weight_cross[:, new] + w_new * (plain_cross[:, new] + gram0[:, 0])
        one[:, old] += 2 * plain_cross[:, new] + gram0[:, 0]
        key_square[:, old] += 2 * key_cross[:, new] + key_gram[:, 0, new]
        norm_sum[:, old] += norms[:, new]
        weight_sum[:, old] += w_new
        left = (length - 1) // 2
        sums, centre = by_centre[length % 2 == 0], slice(left, left + n)
        sums[..., centre] += shifted[:, zero_shift + length // 2, :, new]
        sums[..., centre] += shifted[:, zero_shift - left, :, old]

        if coherent:
            coherence = key_square[:, old].clamp_min(0) / norm_sum[:, old].square().clamp_min(EPS)
            multiplicity[:, reach, old] = (length * coherence).clamp(1, length)
        else:
            multiplicity[:, reach, old] = length
        ours = torch.add(minus_total, sums[..., centre], alpha=1 / length)
        ours.clamp_(max=LOGIT_LIMIT).exp_().mul_(multiplicity[:, reach, None, old])
        # The merged value is (sum w v + lift * sum v) / norm; with all weights 0 it is the plain mean.
        blank = weight_sum[:, old] * (1 + base) <= EPS
        norm = torch.where(blank, 1.0 * length, weight_sum[:, old] * (1 + base))
        lift = torch.where(blank, 1.0, base * weight_sum[:, old] / length)
        value_square = (ww[:, old] + lift * (2 * w1[:, old] + lift * one[:, old])).clamp_min(0) / norm.square()
        here = mass[..., old]
        # Z |M - M'|^2 / |M|^2 = Z + Z (Z'^2 |v'|^2 - 2 Z' M.v') / |M|^2
        rest = with_weighted[..., old] * (-2 / norm)[:, None]
        rest.addcmul_(with_plain[..., old], (-2 * lift / norm)[:, None]).addcmul_(ours, value_square[:, None])
        rest.mul_(ours).mul_(here).div_(square[..., old].clamp_min(EPS))
        of_mass = ours.sub_(here).square_().div_(here.clamp_min(LEAST_MASS))
        of_moment = (total_mass[:, old] + rest.mean(1)).clamp_min(0)
        distortion[:, reach, old] = torch.lerp(of_moment, of_mass.mean(1), mass_share)


def gram_band(rows: Tensor, longest: int) -> Tensor:
    """Return `[U, longest, N]`: `rows[t] . rows[t + d]` at `[d, t]` for `rows [U, N, D]`, formed in blocks so that the
    work grows with `N * longest` and not with `N * N`. What reaches over the end is 0."""
    units, tokens, dim = rows.shape
    blocks = -(-tokens // _ROWS)
    width = _ROWS + longest - 1
    padded = F.pad(rows, (0, 0, 0, blocks * _ROWS + longest - 1 - tokens)).contiguous()
    strides = padded.stride()
    right = padded.as_strided((units, blocks, width, dim), (strides[0], _ROWS * dim, dim, 1))
    left = padded[:, : blocks * _ROWS].unflatten(1, (blocks, _ROWS))
    product = left @ right.mT  # [U, blocks, ROWS, width]
    outer = _ROWS * width
    band = product.as_strided((units, longest, blocks, _ROWS), (blocks * outer, 1, outer, width + 1))
    return band.reshape(units, longest, blocks * _ROWS)[..., :tokens].contiguous()
