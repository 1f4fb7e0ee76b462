"""Who gets how many bits: reverse water-filling over channels (AATC, section on bit allocation; methods.md 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvframe.errors import StageError


def water_level(importance: Tensor, budget: float) -> tuple[Tensor, float]:
    """The relaxed solution: widths `max(0, log2(importance / level) / 2)`, fp64, that add up to `budget` bits, and the
    level. All channels with bits have the same weighted distortion, the level itself."""
    logs = importance.double().clamp_min(torch.finfo(torch.float64).tiny).log2()
    count = torch.arange(1, len(logs) + 1, dtype=torch.float64)
    # Level at which the k largest channels alone spend the budget; with too few or too many of them it is lower.
    level = float(((logs.sort(descending=True).values.cumsum(0) - 2 * budget) / count).max())
    return ((logs - level) / 2).clamp_min(0), 2.0**level


def high_rate(max_width: int) -> Tensor:
    """The paper's model of the relative distortion, `2^-2b` for b = 0..max_width, fp64."""
    return 4.0 ** -torch.arange(max_width + 1, dtype=torch.float64)


def lower_hull(distortion: Tensor) -> Tensor:
    """The largest convex function that lies nowhere above `distortion [W + 1]`, at whole widths, fp64.

    A width that lies above the hull (one bit of the paper's code, for example) is skipped by the greedy but for one
    channel at the margin."""
    points = distortion.double().tolist()
    corners: list[int] = []
    for width, value in enumerate(points):
        while len(corners) >= 2:
            before, last = corners[-2], corners[-1]
            chord = points[before] + (value - points[before]) * (last - before) / (width - before)
            if points[last] < chord:
                break
            corners.pop()
        corners.append(width)
    hull = list(points)
    for begin, end in pairwise(corners):
        for width in range(begin, end):
            hull[width] = points[begin] + (points[end] - points[begin]) * (width - begin) / (end - begin)
    result = torch.tensor(hull, dtype=torch.float64)
    # Rounding on a straight piece must not make it concave, nor may noise make more bits worse.
    return torch.cummin(result, 0).values


def fill(importance: Tensor, distortion: Tensor, budget: int) -> Tensor:
    """Widths int64 `[C]` that minimise `sum importance * D(width)` with exactly `budget` bits.

    `importance [C]`, `distortion [C, W + 1]` convex and decreasing along the width. Each bit goes where it takes away
    most, which is optimal for convex distortions; of equal gains the earlier channel's come first, so that a channel is
    finished before the next begins. Raises StageError if the bits do not fit."""
    channels, most = distortion.shape[0], distortion.shape[1] - 1
    if not 0 <= budget <= channels * most:
        raise StageError(
            f"{budget} bits cannot be shared out over {channels} channels of 0 to {most} bits each; "
            "lower key_bits or value_bits, or raise max_width."
        )
    gains = importance.double()[:, None] * (distortion[:, :-1] - distortion[:, 1:]).double()  # [C, W]
    # Guard the order along a channel against rounding: a later bit never gains more than the one before.
    gains = torch.cummin(gains, 1).values
    chosen = gains.flatten().sort(descending=True, stable=True).indices[:budget]
    return torch.bincount(chosen // most, minlength=channels)


def allocate(
    importance: Tensor, distortion: Tensor, targets: Sequence[int], scope: str, free: Sequence[int] = ()
) -> Tensor:
    """Widths int64 `[L, Gr, C]` for `importance [L, Gr, C]` and `distortion [L, Gr, W + 1]`.

    `targets` are the bits of each layer. With `scope` "group" every group of heads has the same share, with "layer" a
    layer's groups share its bits; with "global" the layers in `free` share theirs. Raises StageError as `fill` does."""
    layers, groups, channels = importance.shape
    curves = distortion[:, :, None].expand(layers, groups, channels, distortion.shape[-1])
    widths = torch.zeros(layers, groups, channels, dtype=torch.int64)

    def share(index: tuple, bits: int) -> None:
        part = widths[index]
        filled = fill(importance[index].reshape(-1), curves[index].reshape(-1, distortion.shape[-1]), bits)
        widths[index] = filled.reshape(part.shape)

    pooled = list(free) if scope == "global" else []
    if pooled:
        share((torch.tensor(pooled),), sum(targets[layer] for layer in pooled))
    for layer in range(layers):
        if layer in pooled:
            continue
        if scope == "group":
            for group in range(groups):
                share((layer, group), targets[layer] // groups)
        else:
            share((layer,), targets[layer])
    return widths


def layer_targets(mean: float, raised: float, layers: int, protected: int, values: int, overhead: int) -> list[int]:
    """Bits of each layer, for `values` channels a row of it: the first `protected` layers get a mean of `mean + raised`
    bits, the others what is left, so that the mean over all layers is `mean`. `overhead` bits a layer (its scales) are
    taken off. Fractions of a bit are rounded down. Raises StageError if nothing sensible is left."""
    first = min(protected, layers)
    kept = [int((mean + raised) * values + 1e-6) - overhead] * first
    rest = layers - first
    total = int(mean * values * layers + 1e-6) - overhead * layers - sum(kept)
    if rest == 0:
        kept = [int(mean * values + 1e-6) - overhead] * first
    elif total < 0 and first:
        raise StageError(
            f"A mean of {mean:g} bits over {layers} layers cannot be met: the {first} protected layers take "
            f"{mean + raised:g} bits each; lower protected_layers or raise the bits."
        )
    if (rest and total < 0) or any(target < 0 for target in kept):
        raise StageError(
            f"A mean of {mean:g} bits cannot be met: the scales alone take {overhead / values:.3g} bits a value; raise "
            "the bits, set scale_bits: 8, or set count_scales: false."
        )
    return kept + [total * (i + 1) // rest - total * i // rest for i in range(rest)]
