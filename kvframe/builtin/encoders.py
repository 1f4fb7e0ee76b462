"""Encoders that need no calibration."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvframe.bias import UnbiasedEncoder, biased, unbiased
from kvframe.ops.ragged_attention import attend_codes
from kvframe.stages import Encoder
from kvframe.types import Encoded, Entries, ModelInfo


class Dense(Encoder):
    """Holds keys and values as the model made them."""

    name: Literal["dense"] = "dense"
    views: ClassVar[bool] = True

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the tensors themselves."""
        codes = {"keys": entries.keys, "values": entries.values}
        return Encoded(entries.offsets, codes, "dense", entries.keys.dtype, entries.log_multiplicity, entries.positions)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return the tensors themselves."""
        codes = encoded.codes
        return Entries(encoded.offsets, codes["keys"], codes["values"], encoded.log_multiplicity, encoded.positions)

    def attend(
        self,
        query: Tensor,
        encoded: Encoded,
        state: Any,
        scale: float,
        impl: str,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """See Encoder.attend."""
        return attend_codes(query, encoded, scale, impl, softcap)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return `2 * D` values of the model's own width."""
        return 2 * model.head_dim * itemsize * 8


class Int8(UnbiasedEncoder):
    """8-bit codes, symmetric, with one bf16 scale for each key and each value (largest magnitude / 127). What the
    model's projections add to every key and value is taken off first."""

    name: Literal["int8"] = "int8"

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return int8 codes `[N, D]` and bf16 scales `[N, 1]` of keys and values."""
        codes: dict[str, Tensor] = {}
        for name, rows in zip(("keys", "values"), unbiased(entries, state), strict=True):
            codes[name], codes[f"{name}_scale"] = quantise(rows)
        return Encoded(entries.offsets, codes, "int8", entries.keys.dtype, entries.log_multiplicity, entries.positions)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return codes times scales."""
        codes = encoded.codes
        keys, values = (codes[n].float() * codes[f"{n}_scale"].float() for n in ("keys", "values"))
        keys, values = biased(encoded, keys, values, state)
        keys, values = keys.to(encoded.dtype), values.to(encoded.dtype)
        return Entries(encoded.offsets, keys, values, encoded.log_multiplicity, encoded.positions)

    def attend(
        self,
        query: Tensor,
        encoded: Encoded,
        state: Any,
        scale: float,
        impl: str,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """See Encoder.attend. With a bias, keys and values are rebuilt first."""
        if state != ():
            encoded = Dense().encode(self.decode(encoded, state), ())
        return attend_codes(query, encoded, scale, impl, softcap)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return 8 bits a value and 16 for each of the two scales."""
        return 2 * (8 * model.head_dim + 16)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and bf16 scales `[N, 1]` of `rows [N, D]`; a row of zeros gets scale 0."""
    rows = rows.float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
    step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    return (rows / step).round().clamp(-127, 127).to(torch.int8), scale
