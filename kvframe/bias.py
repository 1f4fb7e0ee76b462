"""Constants that a model adds to every key and value, as Qwen2.5 does: up to 300 in a few channels. They are known, so
an encoder that has one scale for a row need not spend its range on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvframe.rope import Rope
from kvframe.stages import Encoder
from kvframe.types import Encoded, Entries, ModelInfo, Observation


@dataclass(frozen=True, eq=False)
class Bias:
    """The biases `[H, D]` of one layer's keys (before RoPE) and values; None for one that does not exist."""

    keys: Tensor | None
    values: Tensor | None
    rope: Rope

    def of_keys(self, offsets: Tensor, positions: Tensor | None) -> Tensor | None:
        """What the keys `[N, D]` of entries at these positions contain, fp32; None for nothing. An entry that stands
        for several tokens contains about that: as it is taken off and added again, it need not be exact."""
        if self.keys is None or positions is None:
            return None
        return self.rope.rotate(_by_row(self.keys, offsets, len(positions)), positions.long())

    def of_values(self, offsets: Tensor, rows: int) -> Tensor | None:
        """What the values `[N, D]`, `rows` of them, contain, fp32; None for nothing."""
        return None if self.values is None else _by_row(self.values, offsets, rows)


def _by_row(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Each entry's row of `bias [H, D]`, fp32 `[N, D]`."""
    heads = torch.arange(len(offsets) - 1, device=offsets.device) % len(bias)
    # How many rows there are is said, so that the device need not be waited for.
    return bias.float().index_select(0, heads.repeat_interleave(offsets.diff(), output_size=rows))


def has_key_bias(model: ModelInfo) -> bool:
    """Whether some layer's keys contain a bias that is not zero, as far as that can be known without weights."""
    return any(_some(model.projection_bias(layer)[0]) is not None for layer in range(model.layers))


def layer_biases(model: ModelInfo, keys: bool = True) -> list[Any]:
    """The Bias of each layer, or () for a layer without one; `keys` False = that of the values alone."""
    found: list[Any] = []
    for layer in range(model.layers):
        key, value = (_some(bias) for bias in model.projection_bias(layer))
        sides = [None if bias is None else bias.view(model.kv_heads, -1) for bias in (key if keys else None, value)]
        found.append(() if sides == [None, None] else Bias(sides[0], sides[1], model.rope[layer]))
    return found


def _some(bias: Tensor | None) -> Tensor | None:
    return bias if bias is not None and (bias.is_meta or bool(bias.any())) else None


def unbiased(entries: Entries, state: Any) -> tuple[Tensor, Tensor]:
    """Keys and values fp32 `[N, D]` without what `state`, a Bias or (), says that they contain."""
    keys, values = entries.keys.float(), entries.values.float()
    if state == ():
        return keys, values
    return (
        _plus(keys, state.of_keys(entries.offsets, entries.positions), -1),
        _plus(values, state.of_values(entries.offsets, len(values)), -1),
    )


def biased(encoded: Encoded, keys: Tensor, values: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """The inverse of `unbiased`, for rows fp32 `[N, D]` that were decoded."""
    if state == ():
        return keys, values
    return (
        _plus(keys, state.of_keys(encoded.offsets, encoded.positions), 1),
        _plus(values, state.of_values(encoded.offsets, len(values)), 1),
    )


def _plus(rows: Tensor, bias: Tensor | None, sign: int) -> Tensor:
    return rows if bias is None else torch.add(rows, bias, alpha=sign)


class UnbiasedEncoder(Encoder):
    """An encoder that takes the biases of keys and values off before it codes and gives them back when it decodes, with
    `unbiased` and `biased`: its state is a layer's Bias. Positions are held for a model whose keys have a bias, and for
    no other, since RoPE turns what each key contains of it."""

    def holds_positions(self, model: ModelInfo) -> bool:
        """See Encoder.holds_positions."""
        return self.uses_positions or has_key_bias(model)

    def fit(self, observation: Observation, bound: Any = None) -> list[Any]:
        """See Encoder.fit: one Bias a layer, or () where there is none."""
        return layer_biases(observation.model)
