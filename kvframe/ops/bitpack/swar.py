"""Packing eight rows at a time inside 64-bit integers: the fast path where a kernel of its own is not to be had."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LANES = 32
ONES = 0x0101010101010101
# Bit 8 i of a word moves to bit 56 + i: one multiplication gathers the lowest bits of eight bytes into the top one.
GATHER = 0x0102040810204080


def pack(codes: Tensor, width: int) -> Tensor:
    """As the reference's `pack`."""
    channels, rows = codes.shape
    blocks = rows // LANES
    if width * rows * channels == 0:
        return torch.zeros(blocks, width, channels, dtype=torch.int32, device=codes.device)
    planes = torch.empty(width, channels, blocks * 4, dtype=torch.uint8, device=codes.device)
    for first in range(0, width, 8):
        part = codes if width <= 8 else (codes.int() >> first) & 255
        # [C, M * 4], one row a byte
        eight = part.to(torch.uint8).reshape(-1).view(torch.int64).view(channels, blocks * 4)
        for plane in range(first, min(width, first + 8)):
            planes[plane] = (((eight >> (plane - first)) & ONES) * GATHER) >> 56
    return planes.view(torch.int32).permute(2, 0, 1).contiguous()


def pack_mixed(codes: Tensor, segments: tuple[tuple[int, int], ...]) -> Tensor:
    """As `bitpack.pack_mixed`, for codes of at most 8 bits: a plane of all channels that have it at a time."""
    channels, rows = codes.shape
    widths = [width for width, count in segments for _ in range(count)]
    eight = codes.to(torch.uint8).reshape(-1).view(torch.int64).view(channels, rows // 8)  # [C, M * 4], one row a byte
    planes = torch.empty(sum(widths), rows // 8, dtype=torch.uint8, device=codes.device)
    begin = 0
    for plane in range(widths[0]):
        count = sum(width > plane for width in widths)
        planes[begin : begin + count] = (((eight[:count] >> plane) & ONES) * GATHER) >> 56
        begin += count
    return planes.view(torch.int32)[_by_segment(segments, codes.device)].T.contiguous()


@cache
def _by_segment(segments: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Where each word of a block stands among the planes of all channels, one plane after the other."""
    widths = [width for width, count in segments for _ in range(count)]
    begins = [0]
    for plane in range(widths[0]):
        begins.append(begins[-1] + sum(width > plane for width in widths))
    order, first = [], 0
    for width, count in segments:
        order += [begins[plane] + first + channel for plane in range(width) for channel in range(count)]
        first += count
    return torch.tensor(order, device=device)


def unpack(words: Tensor, width: int) -> Tensor:
    """As the reference's `unpack`."""
    blocks, _, channels = words.shape
    if words.numel() == 0:
        kind = torch.uint8 if width <= 8 else torch.int32
        return torch.zeros(channels, blocks * LANES, dtype=kind, device=words.device)
    # Copied into a new tensor: one of a single block counts as contiguous with strides that no view of bytes allows.
    planes = words.new_empty(width, channels, blocks).copy_(words.permute(1, 2, 0)).view(torch.uint8)
    table = _spread(words.device)
    halves = []
    for first in range(0, width, 8):
        eight = table.take(planes[first].long())  # [C, M * 4], one row a byte
        for plane in range(first + 1, min(width, first + 8)):
            eight |= table.take(planes[plane].long()) << (plane - first)
        halves.append(eight.view(torch.uint8))
    return halves[0] if width <= 8 else halves[0].int() | (halves[1].int() << 8)


@cache
def _spread(device: torch.device) -> Tensor:
    """For each byte the word whose byte `i` is the byte's bit `i`."""
    byte = torch.arange(256, device=device)
    word = torch.zeros(256, dtype=torch.int64, device=device)
    for bit in range(8):
        word |= ((byte >> bit) & 1) << (8 * bit)
    return word
