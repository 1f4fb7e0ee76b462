"""Entries of one layer to codes and back, given its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import bitpack
from kvframe.types import Encoded, Entries, storage_bytes
from kvframe_aatc.layout import continued, gather, group_runs, pack_positions, pick, scatter, unpack_positions, windows
from kvframe_aatc.states import LayerState

# Rows of each (batch row, group of heads) rebuilt at once: what a decode step needs beside the codes.
TILE = 1024
ROW_CODES = ("key_scales", "value_scales")


def encode(entries: Entries, state: LayerState, name: str) -> Encoded:
    """Code the entries. The positions of keys that are coded before RoPE become a number a block."""
    runs = group_runs(entries.bounds, state.kv_heads, state.heads)
    found: dict[str, list[Tensor]] = {"keys": [], "values": [], "key_scales": [], "value_scales": []}
    where: list[Tensor] = []
    for index, (group, run) in enumerate(zip(state.groups, runs, strict=True)):
        keys, values = (
            gather(x, entries.bounds, state.kv_heads, state.heads, index) for x in (entries.keys, entries.values)
        )
        if state.rope is not None:
            where.append(_rows_at(entries, state, index))
            keys = state.rope.unrotate(keys, where[-1])
        for side, coder, rows in (("key", group.keys, keys), ("value", group.values, values)):
            flat = rows.float().transpose(0, 1).flatten(1)  # [R, n * D]
            words, scales = coder.encode(flat, run)
            found[f"{side}s"].append(words.flatten())
            found[f"{side}_scales"].append(scales)
    codes = {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in found.items()}
    if state.rope is not None:
        codes |= _positions(torch.cat(where), together(runs))
    return Encoded(entries.offsets, codes, name, entries.keys.dtype, entries.log_multiplicity)


def tiles(encoded: Encoded, state: LayerState, size: int = TILE) -> Iterator[Entries]:
    """The entries in pieces of at most `size` rows of each (batch row, group of heads)."""
    runs = group_runs(encoded.bounds, state.kv_heads, state.heads)
    parts = split(encoded, state, runs)
    bias = encoded.log_multiplicity
    for window in windows(runs, size):
        keys, values, where, multiplicity, cut = [], [], [], [], []
        for index, (group, run, ranges) in enumerate(zip(state.groups, runs, window, strict=True)):
            own = bitpack.Runs(tuple(end - begin for begin, end in ranges))
            picked = {
                key: pick(tensor, run.lengths, ranges, 1 if key in ROW_CODES else bitpack.LANES)
                for key, tensor in parts[index].items()
            }
            key_rows = _by_head(group.keys.decode(picked["keys"], picked["key_scales"], own), state.heads)
            if state.rope is not None:
                positions = unpack_positions(picked["starts"], picked["distances"], own)
                key_rows = state.rope.rotate(key_rows, positions)
                where.append(positions.int().expand(state.heads, -1)[..., None])
            if bias is not None:
                column = gather(bias[:, None], encoded.bounds, state.kv_heads, state.heads, index).transpose(0, 1)
                multiplicity.append(pick(column, run.lengths, ranges, 1).transpose(0, 1))
            keys.append(key_rows)
            values.append(_by_head(group.values.decode(picked["values"], picked["value_scales"], own), state.heads))
            cut.append(own)
        counts = [own.lengths[row] for row in range(len(cut[0].lengths)) for own in cut for _ in range(state.heads)]
        yield Entries(
            torch.tensor([0, *counts], device=encoded.offsets.device).cumsum(0),
            _narrow(scatter(keys, cut), encoded.dtype),
            _narrow(scatter(values, cut), encoded.dtype),
            scatter(multiplicity, cut)[:, 0] if multiplicity else None,
            scatter(where, cut)[:, 0] if where else None,
        )


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """`[R, n * D]` as `[n, R, D]`."""
    return rows.view(rows.shape[0], heads, rows.shape[1] // heads).transpose(0, 1)


def join(first: Encoded, second: Encoded, state: LayerState) -> Encoded | None:
    """The codes of `first` and then `second` in each (b, h): planes are shifted, nothing is coded anew. None if the
    positions would take more room together than apart."""
    runs, more = (group_runs(e.bounds, state.kv_heads, state.heads) for e in (first, second))
    every, added = together(runs), together(more)
    parts = zip(split(first, state, runs), split(second, state, more), runs, more, strict=True)
    words: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for one, two, run, other in parts:
        for key, pieces in words.items():
            pieces.append(run.join(one[key], other, two[key]).flatten())
    codes = {key: torch.cat(pieces) for key, pieces in words.items()}
    codes |= {key: every.join_rows(first.codes[key], added, second.codes[key]) for key in ROW_CODES}
    if state.rope is not None:
        codes |= _join_positions(first, every, second, added)
    multiplicity = None
    if first.log_multiplicity is not None or second.log_multiplicity is not None:
        multiplicity = _join_multiplicity(first, second)
    joined = Encoded(first.offsets + second.offsets, codes, first.format, first.dtype, multiplicity)
    apart = storage_bytes(first.codes.values()) + storage_bytes(second.codes.values())
    return joined if storage_bytes(codes.values()) <= apart else None


def select(encoded: Encoded, rows: Sequence[int], batch: int, state: LayerState) -> Encoded:
    """The codes of these of the `batch` rows."""
    runs = group_runs(encoded.bounds, state.kv_heads, state.heads)
    found: dict[str, list[Tensor]] = {name: [] for name in encoded.codes}
    for part, run in zip(split(encoded, state, runs), runs, strict=True):
        for name, pieces in found.items():
            picked = (run.select_rows if name in ROW_CODES else run.select)(part[name], rows)
            pieces.append(picked.flatten() if name in ("keys", "values") else picked)
    return encoded.pick(rows, batch, {name: torch.cat(pieces) for name, pieces in found.items()})


def together(runs: list[bitpack.Runs]) -> bitpack.Runs:
    """The runs of all groups, one behind the other."""
    return bitpack.Runs(tuple(n for run in runs for n in run.lengths))


def split(encoded: Encoded, state: LayerState, runs: list[bitpack.Runs]) -> list[dict[str, Tensor]]:
    """The codes of each group: words `[M, W]` of keys and values, scales `[R]`, starts `[M]`, distances `[M, w]`."""
    blocks, rows = [sum(run.blocks) for run in runs], [run.rows for run in runs]
    found: list[dict[str, Tensor]] = [{} for _ in runs]
    for side in ("keys", "values"):
        widths = [getattr(group, side).channels.words for group in state.groups]
        pieces = encoded.codes[side].split([m * w for m, w in zip(blocks, widths, strict=True)])
        for group, piece, m, w in zip(found, pieces, blocks, widths, strict=True):
            group[side] = piece.view(m, w)
    for key in ROW_CODES:
        for group, piece in zip(found, encoded.codes[key].split(rows), strict=True):
            group[key] = piece
    if state.rope is not None:
        for key, tensor in (("starts", encoded.codes["starts"]), ("distances", _distances(encoded))):
            for group, piece in zip(found, tensor.split(blocks), strict=True):
                group[key] = piece
    return found


def _distances(encoded: Encoded) -> Tensor:
    starts = encoded.codes["starts"]
    return encoded.codes.get("distances", starts.new_zeros(len(starts), 0))


def _positions(positions: Tensor, runs: bitpack.Runs) -> dict[str, Tensor]:
    starts, distances = pack_positions(positions, runs)
    return {"starts": starts, "distances": distances} if distances.numel() else {"starts": starts}


def _join_positions(first: Encoded, runs: bitpack.Runs, second: Encoded, more: bitpack.Runs) -> dict[str, Tensor]:
    """The positions of both."""
    if "distances" not in first.codes and "distances" not in second.codes:
        starts = continued(first.codes["starts"], runs, second.codes["starts"], more)
        if starts is not None:
            return {"starts": starts}
    mine, theirs = (unpack_positions(e.codes["starts"], _distances(e), r) for e, r in ((first, runs), (second, more)))
    return _positions(runs.join_rows(mine, more, theirs), runs + more)


def _join_multiplicity(first: Encoded, second: Encoded) -> Tensor:
    """Log multiplicities head by head, 0 where one side has none."""
    runs, more = (bitpack.Runs(tuple(e.offsets.diff().tolist())) for e in (first, second))
    zeros = [torch.zeros(int(e.offsets[-1]), device=e.offsets.device) for e in (first, second)]
    mine, theirs = (
        z if e.log_multiplicity is None else e.log_multiplicity for e, z in zip((first, second), zeros, strict=True)
    )
    return runs.join_rows(mine, more, theirs)


def _narrow(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 rows in the dtype that came in; what rounding lifts beyond float16 stays at its largest number."""
    if dtype == torch.float16:
        rows = rows.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return rows.to(dtype)


def _rows_at(entries: Entries, state: LayerState, group: int) -> Tensor:
    """Positions `[R]` of one group's rows. Raises StageError if the entries have none."""
    if entries.positions is None:
        raise StageError("Keys that are coded before RoPE need the entries' positions, but these entries have none.")
    first = range(group * state.heads, len(entries.bounds) - 1, state.kv_heads)
    return torch.cat([entries.positions[entries.bounds[pair] : entries.bounds[pair + 1]] for pair in first]).long()
