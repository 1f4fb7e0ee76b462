"""Triton kernels: one program packs or unpacks a block of 32 rows for a tile of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.launch import beside_its_tensors

LANES = 32
TILE = 32


@triton.jit
def _pack(codes, words, channels, rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`codes` int32 `[C, M * 32]` -> `words` int32 `[M, WIDTH, C]`; grid `(M, ceil(C / TILE))`."""
    block = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, 32)
    inside = channel < channels
    place = channel[:, None].to(tl.int64) * rows + block * 32 + lane[None, :]
    code = tl.load(codes + place, mask=inside[:, None], other=0)  # [TILE, 32]
    for plane in tl.static_range(WIDTH):
        # Lanes have a bit each, so a sum is an or.
        word = tl.sum(((code >> plane) & 1) << lane[None, :], axis=1)
        target = (block * WIDTH + plane).to(tl.int64) * channels + channel
        tl.store(words + target, word, mask=inside)


@triton.jit
def _unpack(words, codes, channels, rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The inverse; grid as for `_pack`."""
    block = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, 32)
    inside = channel < channels
    code = tl.zeros((TILE, 32), dtype=tl.int32)
    for plane in tl.static_range(WIDTH):
        source = (block * WIDTH + plane).to(tl.int64) * channels + channel
        word = tl.load(words + source, mask=inside, other=0)
        code |= ((word[:, None] >> lane[None, :]) & 1) << plane
    place = channel[:, None].to(tl.int64) * rows + block * 32 + lane[None, :]
    tl.store(codes + place, code, mask=inside[:, None])


def check(tensor: Tensor) -> None:
    """Raise InputError where the kernels cannot run."""
    if tensor.device.type != "cuda" and not _interpreted():
        raise InputError(
            f"bitpack's Triton kernels need a GPU, but the tensor is on {tensor.device}; use impl='auto', or set "
            "TRITON_INTERPRET=1 before Python starts to run them on the CPU, slowly."
        )


def _interpreted() -> bool:
    """Whether kernels are run by Triton's interpreter, as was decided when this module was imported."""
    return not isinstance(_pack, triton.runtime.JITFunction)


@beside_its_tensors
def pack(codes: Tensor, width: int) -> Tensor:
    """As the reference's `pack`."""
    channels, rows = codes.shape
    words = torch.zeros(rows // LANES, width, channels, dtype=torch.int32, device=codes.device)
    if words.numel():
        grid = (rows // LANES, triton.cdiv(channels, TILE))
        _pack[grid](codes.int().contiguous(), words, channels, rows, WIDTH=width, TILE=TILE)
    return words


@beside_its_tensors
def unpack(words: Tensor, width: int) -> Tensor:
    """As the reference's `unpack`."""
    blocks, _, channels = words.shape
    codes = torch.zeros(channels, blocks * LANES, dtype=torch.int32, device=words.device)
    if words.numel():
        grid = (blocks, triton.cdiv(channels, TILE))
        _unpack[grid](words.contiguous(), codes, channels, blocks * LANES, WIDTH=width, TILE=TILE)
    return codes.to(torch.uint8) if width <= 8 else codes
