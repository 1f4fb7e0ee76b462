"""KIVI: keys per channel, values per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.bias import biased, layer_biases, unbiased
from kvframe.ops import bitpack
from kvframe.stages import Encoder
from kvframe.types import Encoded, Entries, ModelInfo, Observation
from kvframe_baselines.affine import affine_codes, affine_values
from kvframe_baselines.blocks import (
    decoded,
    encoded,
    join_rows,
    pack_rows,
    pairs_of,
    runs_of,
    select_rows,
    unpack_rows,
)


class Kivi(Encoder):
    """Codes keys in groups of tokens, channel by channel, and values in groups of channels, token by token, both
    asymmetrically. A group of keys that is not full has a smallest value and a step of its own all the same, so blocks
    should be flushed whole: `decode.flush` a multiple of `group`."""

    name: Literal["baselines.kivi"] = "baselines.kivi"
    paper: ClassVar[str] = "Liu et al., 2024, arXiv 2402.02750"
    # A block that is not full is padded; its codes cannot be appended to.
    block: ClassVar[int] = 64

    bits: int = Field(2, ge=1, le=8, description="Bits of each channel.")
    group: Literal[32, 64] = Field(
        32, description="Tokens of a group of keys; channels, at least, of a group of values."
    )

    def fit(self, observation: Observation, bound: Any = None) -> Sequence[Any]:
        """See Encoder.fit: what the model adds to every value. A key's groups go along a channel, where a constant only
        moves the smallest value."""
        return layer_biases(observation.model, keys=False)

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return words `[M, bits, D]` of both; float16 low and step of keys `[groups, D]`, of values `[N, groups]`."""
        runs = runs_of(entries.bounds)
        group, count = self._group_of_rows(runs, entries.offsets.device)
        keys, plain_values = unbiased(entries, state)
        index = group[:, None].expand(-1, keys.shape[1])
        low, high = (
            keys.new_zeros(count, keys.shape[1]).scatter_reduce(0, index, keys, kind, include_self=False)
            for kind in ("amin", "amax")
        )
        numbers, key_low, key_step = self._by_group(keys, low, high, group)
        values = self._channel_groups(plain_values)  # [N, g, D / g]
        value_numbers, value_low, value_step = affine_codes(
            values, self.bits, values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        )
        codes = {
            "keys": pack_rows(numbers, self.bits, runs),
            "key_low": key_low,
            "key_step": key_step,
            "values": pack_rows(value_numbers.flatten(1), self.bits, runs),
            "value_low": value_low[..., 0],
            "value_step": value_step[..., 0],
        }
        return encoded(entries, codes, f"kivi{self.group}")

    def _by_group(self, keys: Tensor, low: Tensor, high: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes of the keys; low and step once a group."""
        numbers, row_low, row_step = affine_codes(keys, self.bits, low[group], high[group])
        first = torch.searchsorted(group, torch.arange(len(low), device=group.device))
        return numbers, row_low[first], row_step[first]

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return `code * step + low`."""
        runs, codes = runs_of(encoded.bounds), encoded.codes
        group, _ = self._group_of_rows(runs, encoded.offsets.device)
        numbers = unpack_rows(codes["keys"], self.bits, runs)
        keys = affine_values(numbers, codes["key_low"][group], codes["key_step"][group])
        numbers = self._channel_groups(unpack_rows(codes["values"], self.bits, runs))
        values = affine_values(numbers, codes["value_low"][..., None], codes["value_step"][..., None])
        return decoded(encoded, *biased(encoded, keys, values.flatten(1), state))

    def _channel_groups(self, rows: Tensor) -> Tensor:
        """`[N, D]` as `[N, g, D / g]`."""
        groups = self._groups_of(rows.shape[1])
        return rows.reshape(len(rows), groups, rows.shape[1] // groups)

    def _groups_of(self, dim: int) -> int:
        """How many groups the channels of a value make: as many as are equally large and no smaller than `group`; a
        head smaller than that is one."""
        return next(count for count in range(max(1, dim // self.group), 0, -1) if dim % count == 0)

    def _group_of_rows(self, runs: bitpack.Runs, device: torch.device) -> tuple[Tensor, int]:
        """The group of keys that each row belongs to, int64 `[N]`, and how many groups there are."""
        pieces, first = [], 0
        for length in runs.lengths:
            pieces.append(first + torch.arange(length, device=device) // self.group)
            first += -(-length // self.group)
        return torch.cat(pieces), first

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Groups behind groups, if those of `first` are full; a group that is not can take no more rows."""
        runs = runs_of(first.bounds)
        if any(length % self.group for length in runs.lengths):
            return None
        groups, more = self._groups(first), self._groups(second)
        by_group = {
            name: groups.join_rows(first.codes[name], more, second.codes[name]) for name in ("key_low", "key_step")
        }
        return join_rows(first, second, ("keys", "values"), by_group)

    def _groups(self, codes: Encoded) -> bitpack.Runs:
        """The groups of keys of each (b, h)."""
        return bitpack.Runs(tuple(-(-length // self.group) for length in runs_of(codes.bounds).lengths))

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: Any) -> Encoded:
        """See Encoder.select."""
        groups, picked = self._groups(encoded), pairs_of(encoded, rows, batch)
        by_group = {name: groups.select_rows(encoded.codes[name], picked) for name in ("key_low", "key_step")}
        return select_rows(encoded, rows, batch, ("keys", "values"), by_group)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return `bits` a channel, 32 a channel and group of keys, 32 a token and group of channels."""
        groups = self._groups_of(model.head_dim)
        return 2 * self.bits * model.head_dim + 32 * model.head_dim / self.group + 32 * groups
