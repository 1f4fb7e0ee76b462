"""How the entries of all heads are shared out over threads."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def work_items(bounds: tuple[int, ...], threads: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return items int64 `[I, 3]`, each `(pair, begin, end)`, and `[P + 1]`, the first item of each pair.

    Long heads are cut into pieces of whole tiles, about four pieces a thread in all, so that threads end together
    however unequal the heads are."""
    share = -(-bounds[-1] // (4 * threads))
    piece = tile * max(4, -(-share // tile))
    items, first = [], [0]
    for pair, (begin, end) in enumerate(pairwise(bounds)):
        items += [(pair, start, min(start + piece, end)) for start in range(begin, end, piece)]
        first.append(len(items))
    return torch.tensor(items, dtype=torch.int64).view(-1, 3), torch.tensor(first)
