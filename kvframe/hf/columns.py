"""What became of the columns of the past: padding, exact, compressed or gone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Columns:
    """Which columns of the past are in compressed parts, and how much padding each row begins with. Columns that hold
    an exact token are the cache's `valid`; what is none of these is gone, or was never seen by a query."""

    def __init__(self) -> None:
        self.padding: Tensor | None = None  # int64 [B], columns before a row's first token
        self.compressed: Tensor | None = None  # bool [B, P], of the columns up to the last compression
        self.edge = 0  # columns that are in no buffer any more
        self.end = 0  # no column from here on is compressed
        self.gaps = False  # some column before the edge is in no part
        self.hidden: Tensor | None = None  # bool [B, R], exact tokens that the mask of the coming call hides

    def see(self, new: Tensor, tokens: Tensor | None) -> None:
        """Count the padding in new columns `bool [B, Q]` of rows that have seen `tokens [B]` before."""
        first = (new.cumsum(1) == 0).sum(1)
        if tokens is None or self.padding is None:
            self.padding = first
        else:
            self.padding = torch.where(tokens > 0, self.padding, self.padding + first)

    def compress(self, taken: Tensor, keep: int, seen: int) -> None:
        """Of the `seen` columns the last ones, `taken` bool `[B, R]`, went into parts; the last `keep` stay in the
        buffer."""
        held = self.held(seen, taken)
        held[:, seen - taken.shape[1] :] |= taken
        self.compressed, self.edge = held, seen - keep
        self._note()

    def _note(self) -> None:
        self.end, self.gaps = 0, False
        if self.compressed is not None:
            found = self.compressed.any(0).nonzero()
            self.end = int(found[-1]) + 1 if len(found) else 0
            self.gaps = not bool(self.compressed[:, : self.edge].all())

    def held(self, seen: int, like: Tensor) -> Tensor:
        """Which of the `seen` columns are in parts, bool `[B, seen]`, a new tensor, on the device of `like [B, …]`."""
        if self.compressed is None:
            return like.new_zeros(len(like), seen, dtype=torch.bool)
        return nn.functional.pad(self.compressed, (0, seen - self.compressed.shape[1]))

    def known(self, valid: Tensor, seen: int) -> Tensor:
        """Which of the `seen` columns hold a token, in parts or exactly (`valid` bool `[B, R]`), bool `[B, seen]`."""
        held = self.held(seen, valid)
        held[:, seen - valid.shape[1] :] |= valid
        return held

    def padded(self, seen: int, like: Tensor) -> Tensor:
        """Which of the `seen` columns come before a row's first token, bool `[B, seen]`."""
        places = torch.arange(seen, device=like.device)
        return places.expand(len(like), seen) < (0 if self.padding is None else self.padding[:, None])

    def drop_last(self, seen: int) -> None:
        """Only `seen` columns are left; none of those that went was compressed."""
        if self.compressed is not None:
            self.compressed = self.compressed[:, :seen]
        if self.padding is not None:
            self.padding = self.padding.clamp_max(seen)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        if self.padding is not None:
            self.padding = self.padding[rows.to(self.padding.device)]
        if self.compressed is not None:
            self.compressed = self.compressed[rows.to(self.compressed.device)]
        self._note()

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self.padding, self.compressed = (None if t is None else t.to(device) for t in (self.padding, self.compressed))

    def fork(self) -> Columns:
        """A copy to go on with."""
        return copy.copy(self)

    def tensors(self) -> list[Tensor]:
        """The tensors held."""
        return [t for t in (self.padding, self.compressed) if t is not None]

    def dump(self) -> dict[str, Any]:
        """What a file holds of it."""
        return {"padding": self.padding, "compressed": self.compressed, "edge": self.edge}

    def restore(self, held: dict[str, Any]) -> None:
        """Hold what `dump` gave."""
        self.padding, self.compressed, self.edge = held["padding"], held["compressed"], held["edge"]
        self._note()
