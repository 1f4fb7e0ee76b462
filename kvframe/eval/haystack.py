"""A running text that fills a context, and sentences hidden in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

# A word, or as much of it as is sure to be a few tokens only: texts without spaces are cut too.
_PIECE = re.compile(r"\S{1,24}\s*")
_SENTENCE_END = re.compile(r"[.!?。！？][\"')\]]*\s*$")


@dataclass(frozen=True)
class Haystack:
    """A text, its white space reduced to single spaces, in pieces of about a word."""

    text: str

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The text's pieces; joined they give it back."""
        return tuple(_PIECE.findall(" ".join(self.text.split())))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The pieces at which a sentence begins."""
        return (0, *(i + 1 for i, piece in enumerate(self.pieces[:-1]) if _SENTENCE_END.search(piece)))

    def window(self, start: int, length: int) -> tuple[str, ...]:
        """`length` pieces from `start` on; after the end comes the beginning."""
        if start + length <= len(self.pieces):
            return self.pieces[start : start + length]
        return (*self.pieces[start:], " ", *self.pieces[: start + length - len(self.pieces)])


def hide(pieces: Sequence[str], sentences: Sequence[tuple[float, str]]) -> str:
    """Insert sentences into the pieces, each at the border between two sentences that is nearest to its depth.

    Depth 0 is before the first piece, 1 behind the last one. Where no sentence ends, any piece may."""
    borders = [i + 1 for i, piece in enumerate(pieces[:-1]) if _SENTENCE_END.search(piece)]
    borders = [0, *borders, len(pieces)] if borders else list(range(len(pieces) + 1))
    placed = sorted((_nearest(borders, depth * len(pieces)), text) for depth, text in sentences)
    parts: list[str] = []
    cuts = [0, *(at for at, _ in placed), len(pieces)]
    for index, (begin, end) in enumerate(pairwise(cuts)):
        parts.append("".join(pieces[begin:end]).strip())
        if index < len(placed):
            parts.append(placed[index][1])
    return " ".join(part for part in parts if part)


def _nearest(borders: Sequence[int], wanted: float) -> int:
    return min(borders, key=lambda border: abs(border - wanted))
