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
_SHIFTS = 4  # rotations of the probes multiplied with the keys at a time


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
    shifted = _Shifted(probes, keys, rope)
    # Sums of shifted logits by the middle position p, for odd and for even lengths.
    by_centre = [logits.clone(), torch.zeros_like(share)]

    # Weights and ones take part as two more probes: their mass, |M|^2 and products are what a merged value needs.
    ones = torch.ones_like(weights)
    share = torch.cat([share.clamp_min(LEAST_MASS), torch.stack([weights, ones], 1)], 1)  # [U, P + 2, N]
    real = slice(0, probes.shape[1])
    norm_sum, key_square, key_cross = plain.norm(dim=-1), key_gram[:, 0].clone(), torch.zeros_like(weights)
    norms, total_mass = norm_sum.clone(), mass_out.clone()
    # By start: mass, |M|^2, M . (weighted sum of values), M . (plain sum of values).
    diagonal = value_gram[:, 0, None]  # [U, 1, N]
    own = share * diagonal
    own_square = share * own
    mass, square, with_weighted, with_plain = share.clone(), own_square.clone(), weights[:, None] * own, own
    cross = torch.zeros_like(share)  # by end b: sum over the interval before b of share_t v_t . v_b
    double, minus_total = 2 * share, -total
    # Working arrays: what is allocated anew at every length would cost more than the arithmetic.
    ours_all, rest_all = torch.empty_like(logits), torch.empty_like(logits)
    for length in range(2, longest + 1):
        reach, n = length - 1, tokens - length + 1
        # Token b = a + reach joins [a, b); `reach` tokens stand before it.
        old, new = slice(0, n), slice(reach, tokens)
        gram, gram0 = value_gram[:, reach, None, :n], diagonal[..., new]
        crossing, share_new, w_new = cross[..., new], share[..., new], weights[:, None, new]
        crossing.addcmul_(share[..., old], gram)
        mass[..., old] += share_new
        total_mass[:, old] += mass_out[:, new]
        square[..., old].addcmul_(double[..., new], crossing).add_(own_square[..., new])
        with_weighted[..., old].addcmul_(crossing, w_new).addcmul_(share_new, crossing[:, -2:-1] + w_new * gram0)
        with_plain[..., old].add_(crossing).addcmul_(share_new, crossing[:, -1:] + gram0)
        key_cross[:, new] += key_gram[:, reach, :n]
        key_square[:, old].add_(key_cross[:, new], alpha=2).add_(key_gram[:, 0, new])
        norm_sum[:, old] += norms[:, new]
        left = (length - 1) // 2
        sums, centre = by_centre[length % 2 == 0], slice(left, left + n)
        sums[..., centre] += shifted.by(length // 2)[..., new]
        sums[..., centre] += shifted.by(-left)[..., old]

        if coherent:
            coherence = key_square[:, old].clamp_min(0) / norm_sum[:, old].square().clamp_min(EPS)
            multiplicity[:, reach, old] = (length * coherence).clamp(1, length)
        else:
            multiplicity[:, reach, old] = length
        ours, rest = ours_all[..., old], rest_all[..., old]
        torch.add(minus_total, sums[..., centre], alpha=1 / length, out=ours)
        ours.clamp_(max=LOGIT_LIMIT).exp_().mul_(multiplicity[:, reach, None, old])
        # The merged value is (sum w v + lift * sum v) / norm; with all weights 0 it is the plain mean.
        weight = mass[:, -2, old]
        blank = weight * (1 + base) <= EPS
        norm = torch.where(blank, 1.0 * length, weight * (1 + base))
        lift = torch.where(blank, 1.0, weight * (base / length))
        value_square = square[:, -2, old] + lift * (2 * with_plain[:, -2, old] + lift * square[:, -1, old])
        value_square = value_square.clamp_min(0) / norm.square()
        here = mass[:, real, old]
        # Z |M - M'|^2 / |M|^2 = Z + Z (Z'^2 |v'|^2 - 2 Z' M.v') / |M|^2
        torch.mul(with_weighted[:, real, old], (-2 / norm)[:, None], out=rest)
        rest.addcmul_(with_plain[:, real, old], (-2 * lift / norm)[:, None]).addcmul_(ours, value_square[:, None])
        rest.mul_(ours).mul_(here)
        of_moment = (total_mass[:, old] + rest.div_(square[:, real, old].clamp_min(EPS)).mean(1)).clamp_min(0)
        of_mass = ours.sub_(here).square_().div_(here).mean(1)
        distortion[:, reach, old] = torch.lerp(of_moment, of_mass, mass_share)


class _Shifted:
    """A merged key is the mean of R(p - t) k_t, so its logit is the mean of (R(t - p) q) . k_t: only as many different
    rotations of the probes occur as an interval is long, and no merged key need be formed. Neighbouring shifts are made
    together and kept until the next ones are asked for."""

    def __init__(self, probes: Tensor, keys: Tensor, rope: Rope) -> None:
        self.probes, self.keys, self.rope = probes, keys, Rope(rope.inv_freq)
        self._held: dict[int, tuple[int, Tensor]] = {}

    def by(self, shift: int) -> Tensor:
        """`[U, P, N]`: the logits of each key for the probes rotated by `shift` = t - p positions."""
        direction = 1 if shift > 0 else -1
        first = (abs(shift) - (shift > 0)) // _SHIFTS * _SHIFTS + (shift > 0)
        held, logits = self._held.get(direction, (-1, self.probes))
        if held != first:
            shifts = direction * torch.arange(first, first + _SHIFTS, device=self.keys.device)
            self._held.pop(direction, None)
            turned = self.rope.rotate(self.probes[:, None], shifts[:, None]).flatten(1, 2)  # [U, shifts * P, D]
            logits = (turned @ self.keys.mT).unflatten(1, (_SHIFTS, -1))
            self._held[direction] = first, logits
        return logits[:, abs(shift) - first]


def turned_probes(probes: Tensor, longest: int, rope: Rope) -> Tensor:
    """`[longest, P, D]`: `probes [P, D]` rotated by each shift from `-((longest - 1) // 2)` to `longest // 2`."""
    shifts = torch.arange(-((longest - 1) // 2), longest // 2 + 1, device=probes.device)
    return Rope(rope.inv_freq).rotate(probes[None], shifts[:, None])


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
