"""Plain asymmetric integers, one group a token: the quantised cache that most programs offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvframe.bias import UnbiasedEncoder, biased, unbiased
from kvframe.ops import bitpack
from kvframe.types import Encoded, Entries, ModelInfo
from kvframe_baselines.affine import affine_codes, affine_values
from kvframe_baselines.blocks import decoded, encoded, join_rows, pack_rows, runs_of, select_rows, unpack_rows

SIDES = ("keys", "values")


class PerToken(UnbiasedEncoder):
    """Codes each key and each value with `bits` bits a channel between its smallest and its largest one."""

    paper: ClassVar[str] = ""  # plain asymmetric integers are older than any paper on caches
    name: Literal["baselines.per_token"] = "baselines.per_token"
    block: ClassVar[int] = bitpack.LANES

    bits: int = Field(4, ge=1, le=8, description="Bits of each channel; 32 more for each key and each value.")

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return words `[M, bits, D]` and float16 `low`, `step` `[N, 1]` of keys and values."""
        runs, codes = runs_of(entries.bounds), {}
        for side, rows in zip(SIDES, unbiased(entries, state), strict=True):
            low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
            numbers, codes[f"{side}_low"], codes[f"{side}_step"] = affine_codes(rows, self.bits, low, high)
            codes[side] = pack_rows(numbers, self.bits, runs)
        return encoded(entries, codes, "per_token")

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return `code * step + low`."""
        runs, codes = runs_of(encoded.bounds), encoded.codes
        keys, values = (
            affine_values(unpack_rows(codes[side], self.bits, runs), codes[f"{side}_low"], codes[f"{side}_step"])
            for side in SIDES
        )
        return decoded(encoded, *biased(encoded, keys, values, state))

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded:
        """Rows behind rows; nothing is coded anew."""
        return join_rows(first, second, SIDES)

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: Any) -> Encoded:
        """See Encoder.select."""
        return select_rows(encoded, rows, batch, SIDES)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return `bits` a channel and 32 for each key and each value."""
        return 2 * (self.bits * model.head_dim + 32)
