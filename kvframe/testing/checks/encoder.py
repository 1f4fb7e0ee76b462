"""Laws of encoders. All of them fit the encoder on the prompts first, without an artefact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from kvframe.ops import merge_attention, ragged_attention
from kvframe.testing.case import BIAS, Case, arguments, as_given, cases_for, coded, first_difference, fitted
from kvframe.testing.law import BrokenError, expect, law
from kvframe.testing.numerics import attention_tolerance
from kvframe.types import Encoded, Entries, storage_bytes

EXTREME = ("random", "constant", "zero", "tiny", "huge")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cases(stage: Any) -> Any:
    return cases_for(stage)


def _extreme(stage: Any) -> Any:
    return cases_for(stage, contents=EXTREME, dtypes=DTYPES)


def _sizes(stage: Any) -> Any:
    return cases_for(stage, contents=("random", "huge"))


def _many(stage: Any) -> Any:
    return cases_for(stage, lengths=(3, 40, 300), min_rows=5, max_rows=7)


def _batches(stage: Any) -> Any:
    return cases_for(stage, lengths=(1, 7, 33), max_rows=3)


def _long(stage: Any) -> Any:
    return cases_for(stage, lengths=(33, 64, 100), max_rows=2, max_protected=0)


def _bit_fields(stage: Any) -> list[str]:
    """Fields that set a number of bits a value."""
    numbers = (name for name, info in type(stage).model_fields.items() if info.annotation in (int, float))
    return [name for name in numbers if name == "bits" or name.endswith("_bits")]


def layers_of(stage: Any, case: Case) -> list[tuple[Entries, Encoded, Entries, Any]]:
    """`(entries, codes, decoded, state)` of each layer."""
    seen, made = arguments(stage, case)
    found = []
    for entries, state in zip(made, fitted(stage, seen), strict=True):
        entries = as_given(stage, entries, case.prompts.model)
        found.append((entries, *coded(stage, entries, state), state))
    return found


def take(entries: Entries, begin: list[int], end: list[int]) -> Entries:
    """Rows `begin[i]:end[i]` of each (b, h), counted from its first one."""
    ranges = [torch.arange(first + b, first + e) for first, b, e in zip(entries.bounds, begin, end, strict=False)]
    rows = torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64)
    lengths = torch.tensor([0, *(e - b for b, e in zip(begin, end, strict=True))])
    optional = {n: t[rows] for n in ("log_multiplicity", "positions") if (t := getattr(entries, n)) is not None}
    return Entries(lengths.cumsum(0), entries.keys[rows], entries.values[rows], **optional)


def _rows_of(entries: Entries, heads: range) -> Entries:
    """Entries of which only these heads have any, as a batch of their row alone."""
    return replace(entries, offsets=entries.offsets[heads.start : heads.stop + 1] - entries.offsets[heads.start])


def same_entries(mine: Entries, theirs: Entries, expected: str, limit: float = 0.0) -> None:
    """Raise BrokenError unless two lists of entries are the same."""
    for name in ("offsets", "keys", "values", "log_multiplicity", "positions"):
        a, b = getattr(mine, name), getattr(theirs, name)
        expect((a is None) == (b is None), expected, f"{name} {'missing' if a is None else 'that nobody gave'}")
        if isinstance(a, Tensor):
            difference = first_difference((a, limit if a.is_floating_point() else 0.0), (b, 0.0))
            expect(not difference, expected, f"{name}: {difference}")


def _order_tolerance(entries: Entries, case: Case) -> float:
    """The same arithmetic on other rows: a matrix product over all heads' channels may be added up in another order."""
    size = max((float(x.abs().max()) for x in (entries.keys, entries.values) if len(x)), default=0.0)
    channels = case.prompts.geometry.kv_heads * entries.keys.shape[-1]
    return 4 * channels * torch.finfo(torch.float32).eps * size


@law("encoder", _extreme)
def decoding_gives_entries_back(stage: Any, case: Case) -> None:
    """Decoding gives as many rows a head, in the dtype that came in; multiplicities, and positions if the encoder uses
    them, come back bit by bit."""
    for entries, encoded, back, _ in layers_of(stage, case):
        expect(torch.equal(encoded.offsets, entries.offsets), f"offsets {entries.offsets}", f"{encoded.offsets}")
        expect(torch.equal(back.offsets, entries.offsets), f"offsets {entries.offsets}", f"{back.offsets}")
        expect(back.keys.shape == entries.keys.shape, f"keys {list(entries.keys.shape)}", str(list(back.keys.shape)))
        expect(back.values.shape == entries.values.shape, "values of the shape that came in", str(back.values.shape))
        for tensor in (back.keys, back.values):
            expect(tensor.dtype == entries.keys.dtype, f"{entries.keys.dtype} again", str(tensor.dtype))
        for name in ("log_multiplicity", "positions"):
            a, b = getattr(entries, name), getattr(back, name)
            expect((a is None) == (b is None) and (a is None or torch.equal(a, b)), f"{name} as it came", f"{b}")


@law("encoder", _extreme)
def decoding_stays_finite(stage: Any, case: Case) -> None:
    """Constant, zero, tiny (1e-6) and huge (3e4) entries in fp32, bf16 and fp16 decode to finite numbers."""
    for _, _, back, _ in layers_of(stage, case):
        for name in ("keys", "values"):
            expect(getattr(back, name).isfinite().all(), f"finite {name}", "inf or NaN")


@law("encoder", _sizes, applies=lambda stage: all(getattr(stage, name) > 0 for name in _bit_fields(stage)))
def decoding_is_nearer_than_nothing(stage: Any, case: Case) -> None:
    """Decoded keys and values, of order 1 or of 3e4, are over all entries nearer to the true ones than zeros are, by a
    hundredth at least; or nowhere off by more than half the range of the true ones, with half of it at least (which is
    what one bit between the smallest and the largest can do). An encoder that is told to spend 0 bits is let off."""
    for entries, _, back, _ in layers_of(stage, case):
        for name in ("keys", "values"):
            true, found = getattr(entries, name).double(), getattr(back, name).double()
            if not len(true):
                continue
            error, energy = float((true - found).square().sum()), float(true.square().sum())
            off, half = float((true - found).abs().max()), float(true.max() - true.min()) / 2
            # The range may itself be stored in 16 bits: 2^-8 is a unit of bf16.
            one_bit = off <= half * (1 + 2**-8) and float(found.max() - found.min()) >= half * (1 - 2**-8)
            expect(error <= 0.99 * energy or one_bit, f"a squared error of {name} of at most {0.99 * energy:.4g}",
                   f"{error:.4g}")  # fmt: skip


@law("encoder", _cases)
def coding_goes_block_by_block(stage: Any, case: Case) -> None:
    """Coding the rows of each head in two portions, cut at a block's border, decodes to the same as coding them at
    once."""
    for entries, _, back, state in layers_of(stage, case):
        lengths = entries.offsets.diff().tolist()
        cut = [n // 2 // stage.block * stage.block for n in lengths]
        portions = [take(entries, [0] * len(cut), cut), take(entries, cut, lengths)]
        one, two = (coded(stage, portion, state)[1] for portion in portions)
        limit = _order_tolerance(entries, case)
        same_entries(one, take(back, [0] * len(cut), cut), "the first rows as from all rows", limit)
        same_entries(two, take(back, cut, lengths), "the last rows as from all rows", limit)


@law("encoder", _many, weight=0.2)
def neighbours_change_nothing(stage: Any, case: Case) -> None:
    """In a batch of five rows and more, some of 300 tokens, the entries of each row decode to what they do when they
    are coded without the other rows, in two portions, cut at a block's border."""
    for entries, _, back, state in layers_of(stage, case):
        lengths = entries.offsets.diff().tolist()
        heads, limit = len(lengths) // len(case.prompts.lengths), _order_tolerance(entries, case)
        for row in case.rows:
            own = range(row * heads, (row + 1) * heads)
            cut = [n // 2 // stage.block * stage.block if i in own else 0 for i, n in enumerate(lengths)]
            end = [n if i in own else 0 for i, n in enumerate(lengths)]
            for first, last in (([0] * len(cut), cut), (cut, end)):
                _, alone = coded(stage, _rows_of(take(entries, first, last), own), state)
                expected = f"the entries {first[own[0]]} to {last[own[0]]} of row {row} as in the whole batch"
                same_entries(alone, _rows_of(take(back, first, last), own), expected, limit)


@law("encoder", _cases)
def joined_codes_decode_to_both(stage: Any, case: Case) -> None:
    """What `join` returns decodes to the rows of the first and then of the second, head by head, and holds no more
    bytes than both did."""
    for entries, _, _, state in layers_of(stage, case):
        lengths = entries.offsets.diff().tolist()
        for cut in ([n // 2 for n in lengths], [n // 2 // stage.block * stage.block for n in lengths]):
            (first, one), (second, two) = (
                coded(stage, take(entries, a, b), state) for a, b in (([0] * len(cut), cut), (cut, lengths))
            )
            joined = stage.join(first, second, state)
            if joined is None:
                continue
            back = stage.decode(joined, state)
            expect(torch.equal(back.offsets, entries.offsets), f"offsets {entries.offsets}", f"{back.offsets}")
            limit = _order_tolerance(entries, case)
            same_entries(take(back, [0] * len(cut), cut), one, "the rows of the first part", limit)
            same_entries(take(back, cut, lengths), two, "the rows of the second part", limit)
            both = storage_bytes([*first.codes.values()]) + storage_bytes([*second.codes.values()])
            held = storage_bytes([*joined.codes.values()])
            expect(held <= both, f"at most the {both} bytes of both", str(held))


@law("encoder", _batches)
def picked_rows_decode_to_themselves(stage: Any, case: Case) -> None:
    """The codes of some batch rows, picked in any order and more than once, decode to what those rows decoded to
    before, and hold no more than the codes of each row would."""
    batch = len(case.prompts.lengths)
    rows = [batch - 1, *range(batch), 0]
    for entries, encoded, back, state in layers_of(stage, case):
        picked = stage.select(encoded, rows, batch, state)
        heads = (len(back.bounds) - 1) // batch
        spans = [range(back.bounds[row * heads], back.bounds[(row + 1) * heads]) for row in rows]
        index = torch.tensor([at for span in spans for at in span], dtype=torch.int64)
        counts = back.offsets.diff().view(batch, heads)[rows].flatten()
        optional = {n: t[index] for n in ("log_multiplicity", "positions") if (t := getattr(back, n)) is not None}
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        expected = Entries(offsets, back.keys[index], back.values[index], **optional)
        limit = _order_tolerance(entries, case)
        same_entries(stage.decode(picked, state), expected, "the rows as they were decoded before", limit)
        held, before = (storage_bytes(codes.codes.values()) for codes in (picked, encoded))
        expect(held <= before * len(rows), f"at most {len(rows)} times the {before} bytes before", str(held))


@law("encoder", _cases)
def tiles_are_the_entries(stage: Any, case: Case) -> None:
    """The pieces that `tiles` yields hold together each head's entries once: attending them gives what attending the
    decoded entries gives."""
    for _, encoded, back, state in layers_of(stage, case):
        pieces = list(stage.tiles(encoded, state))
        expect(pieces or not len(back.keys), "a tile at least")
        if not pieces:
            continue
        total = torch.stack([piece.offsets.diff() for piece in pieces]).sum(0)
        expect(torch.equal(total, back.offsets.diff()), f"{back.offsets.diff()} rows a head", f"{total}")
        query, scale = case.query(), case.scale
        whole = ragged_attention(query.double(), back, scale, impl="reference")
        parts = merge_attention([ragged_attention(query.double(), piece, scale, impl="reference") for piece in pieces])
        for name, a, b, limit in zip(
            ("out", "lse"), parts, whole, attention_tolerance(query, back, scale), strict=True
        ):
            difference = first_difference((a, limit), (b, 0.0))
            expect(not difference, "attention over the tiles as over all entries", f"{name}: {difference}")


@law("encoder", _cases)
def declared_bits_are_held(stage: Any, case: Case) -> None:
    """`bits_per_entry` times the entries is the size of the storages behind the codes, but for the last block of each
    head and less than one element a row of each code of whole numbers, to which it may be padded: no less (nothing lies
    outside) and no more (no view of something larger is held)."""
    for entries, encoded, _, state in layers_of(stage, case):
        held = storage_bytes(encoded.codes.values())
        bits = stage.bits_per_entry(case.prompts.model, entries.keys.element_size(), state)
        lengths = entries.offsets.diff()
        rounded = int(((lengths + stage.block - 1) // stage.block * stage.block).sum())
        low, high = bits * len(entries.keys) / 8, bits * rounded / 8
        padded = sum(codes.element_size() for codes in encoded.codes.values() if not codes.is_floating_point())
        slack = padded * rounded
        # A rounded millionth: bits may be a fraction.
        fits = held <= high * (1 + 1e-6) or held < high + slack
        expect(fits, f"at most {high:.0f} bytes for {len(entries.keys)} entries of {bits} bits and less than {slack} "
               "of padding", f"{held}")  # fmt: skip
        # A rounded hundredth: a declared mean over layers need not be that of each layer.
        expect(held >= 0.99 * low, f"at least the declared {low:.0f} bytes", f"{held}")


@law("encoder", _cases, weight=0.5)
def nothing_is_coded_as_nothing(stage: Any, case: Case) -> None:
    """A layer without entries, and heads without entries, can be coded, joined and decoded; no codes are held for
    them."""
    for entries, encoded, back, state in layers_of(stage, case):
        zeros = [0] * (len(entries.bounds) - 1)
        codes, empty = coded(stage, take(entries, zeros, zeros), state)
        expect(not len(empty.keys) and not len(empty.values), "no rows", str(list(empty.keys.shape)))
        held = storage_bytes(codes.codes.values())
        expect(held == 0, "no bytes of codes for no entries", f"{held}")
        for one, two in ((codes, encoded), (encoded, codes)):
            if (joined := stage.join(one, two, state)) is not None:
                limit = _order_tolerance(entries, case)
                same_entries(stage.decode(joined, state), back, "the entries of the part that has some", limit)


@law("encoder", _cases, weight=0.2)
def grades_are_ordered(stage: Any, case: Case) -> None:
    """The encoders that `grades` offers cost more from one to the next and lose no more; what they lose is a share. All
    agree on the heads they join, on positions and on blocks."""
    seen, _ = arguments(stage, case)
    offered = stage.grades()
    kinds = {(grade.joins_heads, grade.uses_positions, grade.block) for grade in offered}
    expect(len(kinds) == 1, "one way of joining heads, of positions and of blocks", str(kinds))
    learned = list(zip(*(fitted(grade, seen) for grade in offered), strict=True))
    bits = [grade.bits_per_entry(case.prompts.model, case.prompts.dtype.itemsize) for grade in offered]
    expect(all(a < b for a, b in pairwise(bits)), "bits that rise from grade to grade", str(bits))
    for index, states in enumerate(learned):
        lost = [grade.error(state) for grade, state in zip(offered, states, strict=True)]
        expect(all(0 <= error <= 1 for error in lost), "errors from 0 to 1", f"{lost} in layer {index}")
        expect(all(a >= b for a, b in pairwise(lost)), "errors that do not rise", f"{lost} in layer {index}")


@law("encoder", _long, weight=0.5)
def known_biases_cost_no_precision(stage: Any, case: Case) -> None:
    """Where the model adds up to 300 to one or two channels of every key and value, in keys those that RoPE hardly
    turns, the other channels come back with at most twice the error that they have where nothing is added."""
    geometry = replace(case.prompts.geometry, theta=1e6, bias=0.0)
    laden = replace(geometry, bias=BIAS)
    free = [bias.view(geometry.kv_heads, -1)[0] == 0 for bias in laden.biases if bias is not None]  # [D] each
    errors = []
    for model in (geometry, laden):
        layers = layers_of(stage, replace(case, keep=8, groups=False, prompts=replace(case.prompts, geometry=model)))
        errors.append(
            [
                float((getattr(back, name).double() - getattr(entries, name).double())[:, some].square().mean().sqrt())
                for entries, _, back, _ in layers
                for name, some in zip(("keys", "values"), free, strict=True)
            ]
        )
    for plain, found in zip(*errors, strict=True):
        # Turning, taking off and adding again each round what is as large as the bias.
        limit = 2 * plain + 8 * torch.finfo(torch.float32).eps * BIAS
        expect(found <= limit, f"an error of at most {limit:.3g}, twice that without biases", f"{found:.3g}")


@law("encoder", _long, applies=lambda stage: bool(_bit_fields(stage)), weight=0.5)
def more_bits_err_less(stage: Any, case: Case) -> None:
    """Two more bits in a field of bits never make the squared error of all keys and values larger."""
    case = replace(case, keep=8)
    for name in _bit_fields(stage):
        try:
            richer = type(stage).model_validate({**stage.model_dump(), name: getattr(stage, name) + 2})
        except ValidationError:
            continue
        errors = [
            sum(
                float((getattr(back, part).double() - getattr(entries, part).double()).square().sum())
                for entries, _, back, _ in layers_of(encoder, case)
                for part in ("keys", "values")
            )
            for encoder in (stage, richer)
        ]
        if errors[1] > errors[0] * (1 + 1e-6):
            raise BrokenError(
                f"expected {name}={getattr(richer, name)} to err at most {errors[0]:.4g}, got {errors[1]:.4g}"
            )
