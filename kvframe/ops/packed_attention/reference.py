"""The specification: unpack, look up, multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops import bitpack
from kvframe.ops.packed_attention.layout import Packed, PackedRows, Rebuild, level_table
from kvframe.ops.ragged_attention.logits import cap_logits


def packed_attention(
    query: Tensor,
    constant: Tensor,
    keys: Packed,
    values: Packed,
    rows: PackedRows,
    softcap: float | None = None,
    shift: Tensor | None = None,
    rebuild: Rebuild | None = None,
) -> tuple[Tensor, Tensor]:
    """See the package's `packed_attention`; fp64 inside."""
    pairs, queries, _ = query.shape
    out = torch.zeros(pairs, queries, values.channels + 1, dtype=torch.float64, device=query.device)
    lse = torch.full((pairs, queries), -torch.inf, dtype=torch.float64, device=query.device)
    for pair, (n, row, first_key, first_value, _) in enumerate(rows.places(keys, values)[0].tolist()):
        if n == 0:
            continue
        group = pair % rows.groups
        meant = [_levels(side, group, n, first) for side, first in ((keys, first_key), (values, first_value))]
        factor, weight = (side.loaded(group, row, n).double() for side in (keys, values))
        if rebuild is None:
            logits = query[pair, :, : len(meant[0])].double() @ meant[0] + constant[pair, :, None].double()
            logits = logits * factor
        else:
            heads = _rebuilt(meant[0], factor, rebuild, group, row, rows.heads)
            logits = (query[pair].double().unflatten(0, (rows.heads, -1)) @ heads.transpose(1, 2)).flatten(0, 1)
        if shift is not None:
            logits = cap_logits(logits + shift[pair, :, None].double(), softcap)
        if rows.log_multiplicity is not None:
            starts = rows.offsets[pair * rows.heads : (pair + 1) * rows.heads].tolist()
            bias = torch.stack([rows.log_multiplicity[start : start + n] for start in starts])
            logits += bias.double().repeat_interleave(queries // rows.heads, 0)
        lse[pair] = logits.logsumexp(-1)
        weights = logits.softmax(-1) * weight
        out[pair, :, : len(meant[1])] = weights @ meant[1].T
        out[pair, :, -1] = weights.sum(-1)
    return out.float(), lse.float()


def _levels(side: Packed, group: int, n: int, first: int) -> Tensor:
    """What the codes of one pair stand for, fp64 `[C, n]`."""
    blocks, wide = -(-n // bitpack.LANES), side.words_a_block[group]
    words = side.words.view(-1)[first : first + blocks * wide].view(blocks, wide)
    found, at = [], 0
    for width, count in side.segments[group]:
        codes = bitpack.unpack(words[:, at : at + width * count].reshape(blocks, width, count), width, "reference")
        at += width * count
        if side.levels:
            table = level_table(words.device)[2**width - 1 : 2 ** (width + 1) - 1]
            found.append(table[codes.long()].double())
        else:
            found.append(codes.double())
    if not found:
        return torch.zeros(0, n, dtype=torch.float64, device=words.device)
    return torch.cat(found)[:, :n]


def _rebuilt(levels: Tensor, scale: Tensor, rebuild: Rebuild, group: int, row: int, heads: int) -> Tensor:
    """The rotated keys of one pair, fp64 `[n, R, D]`."""
    flat = levels.T @ rebuild.synthesis[group, : len(levels)].double() + rebuild.first[group].double()
    flat = flat * scale[:, None] + rebuild.center[group].double()
    keys = flat.unflatten(1, (heads, -1)).transpose(0, 1)
    at = rebuild.positions[row : row + len(scale)].long()
    cos, sin = rebuild.cos[at].double(), rebuild.sin[at].double()
    half = cos.shape[1]
    one, two, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)
