"""The specification: unpack, look up, multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.ops import bitpack
from kvframe.ops.packed_attention.layout import Packed, PackedRows, level_table


def packed_attention(
    query: Tensor, constant: Tensor, keys: Packed, values: Packed, rows: PackedRows
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
        logits = query[pair, :, : len(meant[0])].double() @ meant[0] + constant[pair, :, None].double()
        logits = logits * factor
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
