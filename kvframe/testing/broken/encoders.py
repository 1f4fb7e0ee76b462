"""Broken encoders: each is the built-in `dense` or `int8` with one fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kvframe.builtin.encoders import Dense, Int8
from kvframe.stages import Encoder
from kvframe.types import Encoded, Entries, ModelInfo, Observation


class BindFails(Dense):
    """Fails for a model with an error that nobody wrote a sentence for."""

    name: Literal["broken.bind_fails"] = "broken.bind_fails"  # type: ignore[assignment]
    breaks: ClassVar = ("binds_or_refuses",)

    def bind(self, model: ModelInfo) -> Any:
        """Fail."""
        raise KeyError("artefact")


class Widens(Dense):
    """Decodes to fp32, whatever came in."""

    name: Literal["broken.widens"] = "broken.widens"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_gives_entries_back",)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return fp32."""
        back = super().decode(encoded, state)
        return replace(back, keys=back.keys.float(), values=back.values.float())


class LosesCounts(Dense):
    """Forgets how many tokens an entry stands for."""

    name: Literal["broken.loses_counts"] = "broken.loses_counts"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_gives_entries_back",)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return entries of multiplicity 1."""
        return replace(super().decode(encoded, state), log_multiplicity=None)


class DividesByZero(Dense):
    """Divides each row by its largest value and multiplies again."""

    name: Literal["broken.divides_by_zero"] = "broken.divides_by_zero"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_stays_finite",)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return NaN for rows of zeros."""
        back = super().decode(encoded, state)
        largest = back.keys.abs().amax(-1, keepdim=True)
        return replace(back, keys=back.keys / largest * largest)


class TurnsValues(Dense):
    """Gives values back with the wrong sign."""

    name: Literal["broken.turns_values"] = "broken.turns_values"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_is_nearer_than_nothing",)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return minus the values."""
        back = super().decode(encoded, state)
        return replace(back, values=-back.values)


class KeepsBias(Int8):
    """Spends its range on what the model adds to every key."""

    name: Literal["broken.keeps_bias"] = "broken.keeps_bias"  # type: ignore[assignment]
    breaks: ClassVar = ("known_biases_cost_no_precision",)

    def fit(self, observation: Observation, bound: Any = None) -> list[Any]:
        """Return nothing that is known."""
        return [()] * len(observation.layers)


class NoValues(Dense):
    """Forgets the values."""

    name: Literal["broken.no_values"] = "broken.no_values"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_is_nearer_than_nothing",)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return zeros as values."""
        back = super().decode(encoded, state)
        return replace(back, values=torch.zeros_like(back.keys))


class FirstScale(Dense):
    """Clips to what it saw first, whoever called it."""

    name: Literal["broken.first_scale"] = "broken.first_scale"  # type: ignore[assignment]
    breaks: ClassVar = ("decoding_is_nearer_than_nothing",)
    largest: ClassVar[list[float]] = []

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return values no larger than ten times the largest of the first call."""
        back = super().decode(encoded, state)
        if not self.largest and len(back.values):
            self.largest.append(10 * float(back.values.abs().max()))
        most = self.largest[0] if self.largest else 0.0
        return replace(back, values=back.values.clamp(-most, most))


class ClampsItsInput(Dense):
    """Takes off what is too large, in what it was given."""

    name: Literal["broken.clamps_its_input"] = "broken.clamps_its_input"  # type: ignore[assignment]
    breaks: ClassVar = ("is_pure",)

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the entries as they are now."""
        entries.keys.clamp_(-6e4, 6e4)
        return super().encode(entries, state)


class SeesNeighbours(Dense):
    """Rounds the values of a large batch with one scale for all of it."""

    name: Literal["broken.sees_neighbours"] = "broken.sees_neighbours"  # type: ignore[assignment]
    breaks: ClassVar = ("neighbours_change_nothing", "known_biases_cost_no_precision")

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the values on a grid, if there are many entries."""
        step = entries.values.abs().amax() / 127 if len(entries.values) > 512 else None
        values = entries.values if step is None else (entries.values / step).round() * step
        return super().encode(replace(entries, values=values), state)


class OneScale(Encoder):
    """One scale for all rows of a batch, although rows are said to be coded one by one."""

    name: Literal["broken.one_scale"] = "broken.one_scale"
    breaks: ClassVar = (
        "coding_goes_block_by_block",
        "row_alone_equals_row_in_batch",
        "picked_rows_decode_to_themselves",
        "known_biases_cost_no_precision",
        "neighbours_change_nothing",
        "declared_bits_are_held",
    )

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return int8 codes `[N, D]` and one scale."""
        codes: dict[str, Tensor] = {}
        for name, rows in (("keys", entries.keys), ("values", entries.values)):
            scale = rows.float().abs().amax() / 127 if len(rows) else rows.new_zeros(0)
            codes[name] = (rows.float() / scale.clamp_min(1e-9)).round().to(torch.int8) if len(rows) else rows.char()
            codes[f"{name}_scale"] = scale.reshape(-1)
        return Encoded(entries.offsets, codes, "one_scale", entries.keys.dtype, entries.log_multiplicity)

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return codes times scale."""
        codes = encoded.codes
        keys, values = (
            (codes[n].float() * (codes[f"{n}_scale"] if len(codes[n]) else 1)).to(encoded.dtype)
            for n in ("keys", "values")
        )
        return Entries(encoded.offsets, keys, values, encoded.log_multiplicity)

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Keep parts apart."""
        return None

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Return 8 bits a value."""
        return 16 * model.head_dim


class JoinsAtTheEnd(Dense):
    """Joins by putting all rows of one part behind all rows of the other, which mixes up the heads."""

    name: Literal["broken.joins_at_the_end"] = "broken.joins_at_the_end"  # type: ignore[assignment]
    breaks: ClassVar = ("joined_codes_decode_to_both",)

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Return the codes concatenated."""
        codes = {name: torch.cat([first.codes[name], second.codes[name]]) for name in first.codes}
        offsets, n = first.offsets + second.offsets, (int(first.offsets[-1]), int(second.offsets[-1]))
        counts = [part.log_multiplicity for part in (first, second)]
        if counts[0] is None and counts[1] is None:
            return replace(first, codes=codes, offsets=offsets)
        known = torch.cat([torch.zeros(size) if c is None else c for c, size in zip(counts, n, strict=True)])
        return replace(first, codes=codes, offsets=offsets, log_multiplicity=known)


class PicksBackwards(Dense):
    """Picks batch rows in the order of their last entries first."""

    name: Literal["broken.picks_backwards"] = "broken.picks_backwards"  # type: ignore[assignment]
    breaks: ClassVar = ("picked_rows_decode_to_themselves",)

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: Any) -> Encoded:
        """Return the entries turned round."""
        picked = super().select(encoded, rows, batch, state)
        return replace(picked, codes={name: codes.flip(0) for name, codes in picked.codes.items()})


class HalfTiles(Dense):
    """Yields a tile too few."""

    name: Literal["broken.half_tiles"] = "broken.half_tiles"  # type: ignore[assignment]
    breaks: ClassVar = ("tiles_are_the_entries",)

    def tiles(self, encoded: Encoded, state: Any) -> Iterator[Entries]:
        """Yield every head but the last."""
        back = self.decode(encoded, state)
        cut = back.bounds[-2]
        count = back.log_multiplicity
        yield Entries(
            back.offsets.clamp_max(cut), back.keys[:cut], back.values[:cut], None if count is None else count[:cut]
        )


class OnlyRounds(Int8):
    """Rounds to 8 bits and holds the result as floats: the quality of a code, the bytes of none."""

    name: Literal["broken.only_rounds"] = "broken.only_rounds"  # type: ignore[assignment]
    breaks: ClassVar = ("declared_bits_are_held",)

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the codes in the dtype of the keys."""
        encoded = super().encode(entries, state)
        return replace(encoded, codes={name: codes.to(encoded.dtype) for name, codes in encoded.codes.items()})


class HidesScales(Int8):
    """Holds two numbers an entry that it does not declare."""

    name: Literal["broken.hides_scales"] = "broken.hides_scales"  # type: ignore[assignment]
    breaks: ClassVar = ("declared_bits_are_held",)

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the codes, and the means of keys and values."""
        encoded = super().encode(entries, state)
        means = torch.stack([entries.keys.float().mean(-1), entries.values.float().mean(-1)], 1)
        return replace(encoded, codes={**encoded.codes, "means": means})


class HoldsViews(Dense):
    """Holds views of a buffer that is twice as large."""

    name: Literal["broken.holds_views"] = "broken.holds_views"  # type: ignore[assignment]
    breaks: ClassVar = ("declared_bits_are_held",)

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the first half of a buffer."""
        encoded = super().encode(entries, state)
        halves = {name: torch.cat([codes, codes])[: len(codes)] for name, codes in encoded.codes.items()}
        return replace(encoded, codes=halves)


class Header(Dense):
    """Holds a header even if there is nothing behind it."""

    name: Literal["broken.header"] = "broken.header"  # type: ignore[assignment]
    breaks: ClassVar = ("nothing_is_coded_as_nothing", "declared_bits_are_held")

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the rows and a header."""
        encoded = super().encode(entries, state)
        return replace(encoded, codes={**encoded.codes, "header": torch.ones(1)})

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Keep parts apart."""
        return None


class DearestFirst(Int8):
    """Offers its grades from the dearest on."""

    name: Literal["broken.dearest_first"] = "broken.dearest_first"  # type: ignore[assignment]
    breaks: ClassVar = ("grades_are_ordered",)

    def grades(self) -> Sequence[Encoder]:
        """Return exact entries, and eight bits."""
        return (Dense(), Int8())


class BitsUpsideDown(Int8):
    """Takes the more bits for a coarser grid."""

    name: Literal["broken.bits_upside_down"] = "broken.bits_upside_down"  # type: ignore[assignment]
    breaks: ClassVar = ("more_bits_err_less",)
    bits: int = Field(3, ge=2, le=8, description="Bits a value.")

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return values on a grid of 2^bits steps of the finest."""
        step = 2.0 ** (self.bits - 2)
        codes = {
            n: c if "scale" in n else ((c / step).round() * step).clamp(-127, 127).to(torch.int8)
            for n, c in encoded.codes.items()
        }
        return super().decode(replace(encoded, codes=codes), state)
