"""From moments to tables: for each layer, side (keys, values) and group of heads a basis and what its channels look
like. Tables do not depend on how many bits there will be, so one calibration serves every budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvframe_aatc.allocation import high_rate
from kvframe_aatc.moments import Moments
from kvframe_aatc.quantiser import Channels
from kvframe_aatc.transform import Basis, block_diagonal, pca, query_weighted, rotation_average

MAX_WIDTH = 16
MEASURED_WIDTH = 8  # beyond, a bit is a factor of four
MEASURED_TOKENS = 1024
PERCENTILE = 0.99
# Gains are at least this share of the mean standard deviation: a channel that was silent in the calibration must not
# make a token's scale explode when it speaks.
SILENT = 1e-3


@dataclass(frozen=True, eq=False)
class Side:
    """The tables of all layers' keys, or values; fp32, the first two dimensions are `[L, Gr]`.

    Attributes:
        analysis, synthesis: `[L, Gr, C, E]`, the basis.
        center: `[L, Gr, E]`, bias and mean.
        gain: `[L, Gr, C]`, what a channel is divided by: the 99th percentile of its magnitude, or its rms.
        energy: `[L, Gr, C]`, second moment of each channel.
        weight: `[L, Gr, C]`, what a unit of its error costs.
        one_bit: `[L, Gr, C]`, the best level of a single symmetric bit, relative to gain and token scale.
        distortion: `[L, Gr, 17]`, measured error by width, relative to the energy, mean over channels.
        median: `[L, Gr]`, median token scale.
    """

    analysis: Tensor
    synthesis: Tensor
    center: Tensor
    gain: Tensor
    energy: Tensor
    weight: Tensor
    one_bit: Tensor
    distortion: Tensor
    median: Tensor


@dataclass(frozen=True, eq=False)
class Tables:
    """Keys and values, and how many tokens they were learned from."""

    keys: Side
    values: Side
    tokens: int

    def tensors(self) -> dict[str, Tensor]:
        """Flat names, for a file."""
        sides = {"keys": self.keys, "values": self.values}
        named = {f"{name}.{f.name}": getattr(side, f.name) for name, side in sides.items() for f in fields(Side)}
        return {**named, "tokens": torch.tensor([self.tokens])}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Tables:
        """The inverse of `tensors`. Raises KeyError for a missing one."""
        keys, values = (Side(*(tensors[f"{side}.{f.name}"] for f in fields(Side))) for side in ("keys", "values"))
        return cls(keys, values, int(tensors["tokens"][0]))


@dataclass(frozen=True)
class Choices:
    """The parameters of the encoder that tables depend on; see its fields."""

    basis: str
    center_keys: bool
    query_rotation: str
    weights: str
    key_code: str
    value_code: str
    one_bit: str


def build(moments: Moments, choices: Choices) -> Tables:
    """The tables of everything that the moments have seen."""
    model, heads = moments.model, moments.heads
    sides: dict[str, list[list[dict[str, Tensor]]]] = {"keys": [], "values": []}
    size = heads * model.head_dim
    for index, sums in enumerate(moments.layers):
        queries = sums.queries / max(1, moments.query_tokens)
        if moments.before_rope and choices.query_rotation == "averaged":
            queries = rotation_average(queries, 2 * len(model.rope[index].inv_freq))
        output = _output_moment(model.output_weight(index), model.kv_heads)
        key_bias, value_bias = model.projection_bias(index)
        sample_keys, sample_values = torch.cat(sums.sample_keys), torch.cat(sums.sample_values)
        for rows in sides.values():
            rows.append([])
        for group in range(model.kv_heads // heads):
            members, columns = slice(group * heads, (group + 1) * heads), slice(group * size, (group + 1) * size)
            seen_by = block_diagonal(queries[members])
            mean = sums.key_sum[group] / moments.tokens * choices.center_keys
            moment = sums.keys[group] / moments.tokens - torch.outer(mean, mean)
            weighted, asked = choices.basis == "query_weighted", moments.query_tokens
            basis = query_weighted(moment, seen_by, asked) if weighted else pca(moment)
            weight = _weight(basis, seen_by, choices, moments.query_tokens)
            center = mean if key_bias is None or not moments.before_rope else mean + key_bias[columns].cpu()
            sample = sample_keys[:, columns] - mean.float()
            sides["keys"][-1].append(_describe(basis, center, weight, sample, choices.key_code, choices.one_bit))

            basis = pca(sums.values[group] / moments.tokens)
            cost = (basis.synthesis @ block_diagonal(output[members]) * basis.synthesis).sum(-1)
            weight = cost if choices.weights == "attention" else torch.ones_like(cost)
            center = torch.zeros(size) if value_bias is None else value_bias[columns].cpu()
            sample = sample_values[:, columns]
            sides["values"][-1].append(_describe(basis, center, weight, sample, choices.value_code, choices.one_bit))
    return Tables(_stack(sides["keys"]), _stack(sides["values"]), moments.tokens)


def _output_moment(weight: Tensor, kv_heads: int) -> Tensor:
    """`sum W W^T [H, D, D]` over the query heads of each KV head, for `weight [Hq, D, hidden]`."""
    heads = weight.detach().cpu().double()
    products = heads @ heads.transpose(1, 2)  # [Hq, D, D]
    return products.view(kv_heads, -1, *products.shape[1:]).sum(1)


def _weight(basis: Basis, seen_by: Tensor, choices: Choices, query_tokens: int) -> Tensor:
    """What a unit of error in each key channel costs: the mean square of the queries' projection on it (Remark 7). In a
    query-weighted basis that is 1 by construction; without queries it is 1 for want of better knowledge."""
    if choices.weights == "none" or choices.basis == "query_weighted" or query_tokens == 0:
        return torch.ones(len(basis.energy), dtype=torch.float64)
    return (basis.synthesis @ seen_by * basis.synthesis).sum(-1)


def _describe(
    basis: Basis, center: Tensor, weight: Tensor, sample: Tensor, code: str, one_bit_code: str
) -> dict[str, Tensor]:
    """The tables of one group, from its basis and a centred sample `[S, E]`."""
    latent = basis.analysis.float() @ sample.T  # [C, S]
    rms = basis.energy.sqrt().float()
    gain = torch.quantile(latent.abs(), PERCENTILE, dim=1) if code == "max" else rms.clone()
    floor = SILENT * basis.energy.mean().sqrt().float()
    # What never moves beyond that is rounding, or next to it, and says nothing of what a code loses.
    latent = latent.masked_fill((latent.abs() <= floor).all(1, keepdim=True), 0)
    gain = gain.clamp_min(floor) if bool(floor > 0) else torch.ones_like(gain)
    one_bit, distortion, median = measure(latent / gain[:, None], code, one_bit_code)
    return {
        "analysis": basis.analysis.float(),
        "synthesis": basis.synthesis.float(),
        "center": center.float(),
        "gain": gain,
        "energy": basis.energy.float(),
        "weight": weight.float(),
        "one_bit": one_bit,
        "distortion": distortion,
        "median": median,
    }


def measure(latent: Tensor, code: str, one_bit_code: str) -> tuple[Tensor, Tensor, Tensor]:
    """For normalised latents `[C, S]`: the best single-bit levels `[C]`, the relative distortion by width `[17]`, mean
    over channels, and the median token scale."""
    step = max(1, latent.shape[1] // MEASURED_TOKENS)
    latent = latent[:, ::step]
    exact = latent.abs().amax(0) if code == "max" else latent.square().mean(0).sqrt()
    power = exact.square()
    total = power.sum()
    if not bool(total > 0):
        return torch.ones(len(latent)), high_rate(MAX_WIDTH).float(), torch.ones(())
    one_bit = (latent.abs() * exact).sum(1) / total
    energy = latent.square().sum(1)
    alive = energy > 0
    distortion = torch.ones(MAX_WIDTH + 1)
    for width in range(1, MAX_WIDTH + 1):
        if width > MEASURED_WIDTH:
            distortion[width] = distortion[width - 1] / 4
            continue
        channels = Channels((width,) * len(latent), code, one_bit if one_bit_code == "symmetric" else None, 16, 1.0)
        error = channels.meant(channels.codes(latent, exact)) * exact - latent
        distortion[width] = (error.square().sum(1)[alive] / energy[alive]).mean()
    return one_bit, distortion, exact[exact > 0].median()


def _stack(rows: list[list[dict[str, Tensor]]]) -> Side:
    stacked = {name: torch.stack([torch.stack([g[name] for g in groups]) for groups in rows]) for name in rows[0][0]}
    return Side(**{name: tensor.contiguous() for name, tensor in stacked.items()})
