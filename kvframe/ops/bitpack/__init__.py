"""Codes of any width from 0 to 16 bits, 32 rows of a channel packed together as bit planes."""

import sys

import torch
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.bitpack import reference, swar
from kvframe.ops.bitpack.join import join
from kvframe.ops.bitpack.runs import Runs

LANES = reference.LANES
MAX_WIDTH = 16
IMPLEMENTATIONS = ("reference", "swar", "triton")


def pack(codes: Tensor, width: int, impl: str = "auto") -> Tensor:
    """Pack unsigned integer `codes [C, M * 32]`, each below `2 ** width`, into words int32 `[M, width, C]`.

    Bit `i` of word `[m, j, c]` is bit `j` of the code of channel `c` in row `32 * m + i`. `impl`: "reference", "swar"
    (torch operations on 64-bit words), "triton" (a GPU), or "auto". Raises InputError for a width outside 0 to 16, rows
    that are no multiple of 32, or an implementation that is not to be had."""
    _check(width)
    if codes.ndim != 2 or codes.shape[1] % LANES:
        raise InputError(f"pack takes codes [C, M * {LANES}], but they are {list(codes.shape)}; pad the last block.")
    return _module(impl, codes).pack(codes, width)


def pack_mixed(codes: Tensor, segments: tuple[tuple[int, int], ...]) -> Tensor:
    """Pack codes `[C, M * 32]` of several widths: `segments` are the `(width, channels)` of adjacent channels, widest
    first. Returns int32 `[M, W]`, each block's words of each segment in turn, as `pack` makes them.

    Raises InputError as `pack` does."""
    widths = [width for width, _ in segments]
    if widths != sorted(widths, reverse=True) or sum(count for _, count in segments) != len(codes):
        raise InputError(f"pack_mixed takes segments of {len(codes)} channels, widest first, but got {segments}.")
    if sys.byteorder == "little" and codes.numel() and 0 < widths[0] <= 8 and codes.shape[1] % LANES == 0:
        return swar.pack_mixed(codes, segments)
    pieces = codes.split([count for _, count in segments]) if segments else ()
    packed = [pack(piece, width).flatten(1) for piece, width in zip(pieces, widths, strict=True)]
    return torch.cat(packed, 1) if packed else codes.new_zeros(codes.shape[1] // LANES, 0, dtype=torch.int32)


def unpack(words: Tensor, width: int, impl: str = "auto") -> Tensor:
    """Return the codes `[C, M * 32]` of words int32 `[M, width, C]`: uint8 up to 8 bits, int32 beyond.

    Raises InputError as `pack` does."""
    _check(width)
    if words.ndim != 3 or words.shape[1] != width:
        raise InputError(f"unpack takes words [M, {width}, C], but they are {list(words.shape)}.")
    return _module(impl, words).unpack(words, width)


def _check(width: int) -> None:
    if not 0 <= width <= MAX_WIDTH:
        raise InputError(f"A code may have 0 to {MAX_WIDTH} bits, but {width} are asked for.")


def _module(impl: str, tensor: Tensor):  # type: ignore[no-untyped-def]
    if impl == "auto":
        # The bytes of a 64-bit word must be in the order of the rows.
        impl = "swar" if sys.byteorder == "little" else "reference"
    if impl == "reference":
        return reference
    if impl == "swar":
        return swar
    if impl == "triton":
        return _triton(tensor)
    raise InputError(f"bitpack has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}.")


def _triton(tensor: Tensor):  # type: ignore[no-untyped-def]
    try:
        import kvframe.ops.bitpack.triton as kernels
    except ImportError as error:
        raise InputError(f"bitpack's Triton kernels cannot be used here: {error}; use impl='auto'.") from error
    kernels.check(tensor)
    return kernels


__all__ = ["LANES", "MAX_WIDTH", "Runs", "join", "pack", "pack_mixed", "unpack"]
