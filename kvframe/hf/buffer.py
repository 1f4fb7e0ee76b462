"""The exact end of the cache: keys and values that grow at the right without copying them at every step."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32  # columns added at least when the buffer is full
SPARE = 32  # columns held beyond a limit, in case that the last ones are taken off again


class Recent:
    """Keys and values `[B, H, R, D]` in a buffer with room at the right.

    The first append takes exactly what it needs; later ones grow the buffer by an eighth, at least 32 columns, so that
    a step copies nothing proportional to the context (amortised)."""

    def __init__(self) -> None:
        self.length = 0
        self._shared = False  # what lies behind the last column may be another buffer's
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """`[B, H, R, D]`, a view."""
        return self._view(self._keys)

    @property
    def values(self) -> Tensor:
        """`[B, H, R, D]`, a view."""
        return self._view(self._values)

    @property
    def dtype(self) -> torch.dtype | None:
        """That of keys and values; None before the first ones."""
        return None if self._keys is None else self._keys.dtype

    def _view(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise RuntimeError("the cache layer is empty")
        return buffer.narrow(2, 0, self.length)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add columns `[B, H, Q, D]` at the right."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None or self._shared or end > self._keys.shape[2]:
            capacity = end if self.length == 0 else max(end, self.length + max(STEP, self.length // 8))
            self._keys = self._grown(self._keys, keys, capacity)
            self._values = self._grown(self._values, values, capacity)
            self._shared = False
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    def _grown(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        new = like.new_empty(*like.shape[:2], capacity, like.shape[3])
        if old is not None:
            new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def last(self, columns: int) -> Recent:
        """The last columns alone, in storage of their size."""
        other = Recent()
        if self._keys is not None and self._values is not None:
            kept = slice(self.length - columns, self.length)
            other._keys = self._keys[:, :, kept].clone(memory_format=torch.contiguous_format)
            other._values = self._values[:, :, kept].clone(memory_format=torch.contiguous_format)
            other.length = columns
        return other

    def mark(self) -> tuple[int, int]:
        """What to go back to: columns held, and columns that there is room for."""
        return self.length, 0 if self._keys is None else self._keys.shape[2]

    def back_to(self, mark: tuple[int, int]) -> None:
        """Let go of what was appended since."""
        self.length, room = mark
        if not room:
            self._keys = self._values = None
        elif self._keys is not None and self._values is not None and room != self._keys.shape[2]:
            self._keys, self._values = (self._grown(t, t, room) for t in (self._keys, self._values))

    def drop_last(self, columns: int) -> None:
        """Let go of the last columns; their room is kept for the next ones."""
        self.length -= columns

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (t[:, :, : self.length][rows.to(t.device)] for t in (self._keys, self._values))
            self._shared = False

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.to(device), self._values.to(device)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Hold these columns; the next append copies, so that the tensors are never written to."""
        self._keys, self._values, self.length, self._shared = keys, values, keys.shape[2], True

    def fork(self) -> Recent:
        """A second buffer on the same storage. The next append to either copies, so that neither sees the other's
        tokens."""
        other = Recent()
        other.length, other._keys, other._values = self.length, self._keys, self._values
        self._shared = other._shared = True
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors held."""
        return [t for t in (self._keys, self._values) if t is not None]


class Tail:
    """The last `limit` columns ("all" = every one) of tensors that come a few columns at a time, along dimension
    `dim`, and some more, so that a few may be taken off again."""

    def __init__(self, limit: int | str, dim: int) -> None:
        self.limit, self.dim = limit, dim
        self._pieces: list[Tensor] = []

    @property
    def length(self) -> int:
        """Columns held."""
        return sum(piece.shape[self.dim] for piece in self._pieces)

    def append(self, piece: Tensor, extra: int = 0) -> None:
        """Add columns at the right; `extra` more than the limit are kept this time (for padding at the end)."""
        if self._pieces and self._pieces[0].device != piece.device:  # read from a file, or moved
            self.to(piece.device)
        self._pieces.append(piece.detach())
        if self.limit != "all":
            self.keep_last(min(self.length, int(self.limit) + extra + SPARE), copy=False)

    def keep_last(self, columns: int, copy: bool = True) -> None:
        """Let go of all but the last columns; with `copy` no storage larger than them stays alive."""
        surplus = self.length - columns
        while self._pieces and surplus >= self._pieces[0].shape[self.dim]:
            surplus -= self._pieces.pop(0).shape[self.dim]
        if surplus > 0:
            first = self._pieces[0]
            self._pieces[0] = first.narrow(self.dim, surplus, first.shape[self.dim] - surplus).clone()
        elif copy:
            self._pieces = [piece.clone() for piece in self._pieces]

    def drop_last(self, columns: int) -> None:
        """Let go of the last columns, or of all if there are fewer."""
        while columns and self._pieces:
            last = self._pieces.pop()
            kept = max(0, last.shape[self.dim] - columns)
            columns -= last.shape[self.dim] - kept
            if kept:
                self._pieces.append(last.narrow(self.dim, 0, kept))

    def cut(self, columns: int) -> None:
        """Let go of all but the first columns."""
        self.drop_last(max(0, self.length - columns))

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        self._pieces = [piece[rows.to(piece.device)] for piece in self._pieces]

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self._pieces = [piece.to(device) for piece in self._pieces]

    def tensor(self, columns: int | None = None) -> Tensor | None:
        """All columns held, or the last `columns` of them; None if there are none."""
        if not self._pieces:
            return None
        whole = self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces, self.dim)
        self._pieces = [whole]
        columns = whole.shape[self.dim] if columns is None else min(columns, whole.shape[self.dim])
        return whole.narrow(self.dim, whole.shape[self.dim] - columns, columns)

    def restore(self, pieces: list[Tensor]) -> None:
        """Hold these tensors; they are never written to."""
        self._pieces = list(pieces)

    def take_over(self, other: Tail) -> None:
        """Hold the same tensors as another tail."""
        self.restore(other._pieces)

    def fork(self) -> Tail:
        """A second tail on the same tensors."""
        other = Tail(self.limit, self.dim)
        other.take_over(self)
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors held."""
        return list(self._pieces)
