"""Scalar codes for the channels of a latent, scaled per token (AATC, section on the quantiser; methods.md 2.4).

All channels are first divided by their own gain: the 99th percentile of their magnitude for the `max` code, their root
mean square for `lloyd`. One scale a token then fits the row: the largest magnitude for `max`, the root mean square for
`lloyd`. A `max` code of b bits is the paper's mid-tread one, steps of `2 / 2^b`; `lloyd` codes are the best ones for a
normal variable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import bitpack, lloyd_max

# 8-bit scales are logarithmic: 12 steps an octave, 127 steps to each side of the calibration's median; 0 is exact zero.
STEPS_PER_OCTAVE = 12
MIDDLE = 128
# Few values, or many borders, are quicker searched for than compared one border after the other.
COMPARED = 5
SEARCHED = 8192


@dataclass(frozen=True, eq=False)
class Channels:
    """How the coded channels of one group of heads are coded. Channels of equal width are adjacent, widest first.

    Attributes:
        widths: bits of each channel, all >= 1.
        code: "max" or "lloyd".
        one_bit: reconstruction of a channel's single bit, fp32 `[C]`, relative to gain and token scale; None = the
            paper's code {-1, 0}.
        scale_bits: 16 (bfloat16) or 8 (logarithmic).
        median: the median token scale of the calibration; only 8-bit scales use it.
    """

    widths: tuple[int, ...]
    code: str
    one_bit: Tensor | None
    scale_bits: int
    median: float

    @property
    def words(self) -> int:
        """Bits of a row, which are words of a block."""
        return sum(self.widths)

    @cached_property
    def segments(self) -> list[tuple[int, slice, slice]]:
        """`(width, its channels, its words in a block)` for each width."""
        found, word = [], 0
        for width in sorted(set(self.widths), reverse=True):
            begin, count = self.widths.index(width), self.widths.count(width)
            found.append((width, slice(begin, begin + count), slice(word, word + count * width)))
            word += count * width
        return found

    @cached_property
    def linear(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """For `max`: `(times, plus, top, step, first)`, each fp32 `[C, 1]`: a normalised value `x` has the code
        `clamp(floor(x * times + plus), 0, top)`, and a code `u` means `u * step + first`."""
        width = torch.tensor(self.widths, dtype=torch.float32)
        half = 2.0 ** (width - 1)
        times, plus, top, step, first = half.clone(), half + 0.5, 2 * half - 1, 1 / half, torch.full_like(half, -1.0)
        if self.one_bit is not None:
            single = width == 1
            level = self.one_bit.float().cpu()
            # |x| <= 1, so floor(x / 2 + 1) is its sign.
            times[single], plus[single] = 0.5, 1.0
            step[single], first[single] = 2 * level[single], -level[single]
        return tuple(t[:, None] for t in (times, plus, top, step, first))  # type: ignore[return-value]

    # --- token scales
    # ---------------------------------------------------------------------------------------------------

    def scale(self, latent: Tensor) -> Tensor:
        """The stored scales `[R]`, bfloat16 or uint8, of normalised latents `[C, R]`.

        A `max` scale is rounded up, so that no value lies outside. Raises StageError for values that are not finite."""
        if not len(latent):
            exact = latent.new_zeros(latent.shape[1])
        elif self.code == "max":
            exact = latent.abs().amax(0)
        else:
            exact = torch.linalg.vector_norm(latent, dim=0) * len(latent) ** -0.5
        if not bool(exact.isfinite().all()):
            raise StageError(
                "Keys or values to be coded hold infinities or NaN, which no code can carry; run the model in bfloat16 "
                "or float32 if it overflows in float16."
            )
        return self._store(exact)

    def _store(self, exact: Tensor) -> Tensor:
        if self.scale_bits == 16:
            return _upwards(exact) if self.code == "max" else exact.to(torch.bfloat16)
        steps = (exact.clamp_min(torch.finfo(torch.float32).tiny) / self.median).log2() * STEPS_PER_OCTAVE + MIDDLE
        steps = steps.ceil() if self.code == "max" else steps.round()
        return torch.where(exact == 0, 0.0, steps.clamp(1, 255)).to(torch.uint8)

    def loaded(self, stored: Tensor) -> Tensor:
        """The scales fp32 `[R]` that stored ones stand for."""
        if self.scale_bits == 16:
            return stored.float()
        code = stored.float()
        return torch.where(code == 0, 0.0, self.median * torch.exp2((code - MIDDLE) / STEPS_PER_OCTAVE))

    # --- codes
    # ----------------------------------------------------------------------------------------------------------

    def codes(self, latent: Tensor, scale: Tensor) -> Tensor:
        """Unsigned codes `[C, R]` (uint8, int32 if some channel has more than 8 bits) of normalised latents, given the
        loaded scales `[R]`."""
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        kind = torch.uint8 if not self.widths or self.widths[0] <= 8 else torch.int32
        if self.code == "max":
            times, plus, top, _, _ = self.moved(latent.device)
            return (latent * inverse).mul_(times).add_(plus).floor_().clamp_min_(0).minimum(top).to(kind)
        shaped = latent * inverse
        codes = torch.empty(latent.shape, dtype=kind, device=latent.device)
        for width, channels, _ in self.segments:
            codes[channels] = _cell(shaped[channels], width).to(kind)
        return codes

    def moved(self, device: torch.device) -> tuple[Tensor, ...]:
        """`linear` on a device."""
        return tuple(t.to(device) for t in self.linear)

    def meant(self, codes: Tensor) -> Tensor:
        """What codes `[C, R]` mean before gain and scale, fp32."""
        if self.code == "max":
            _, _, _, step, first = self.moved(codes.device)
            return codes.float() * step + first
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for width, channels, _ in self.segments:
            out[channels] = _levels(width, codes.device)[codes[channels].long()]
        return out

    # --- words
    # ----------------------------------------------------------------------------------------------------------

    def pack(self, lanes: Tensor) -> Tensor:
        """Words int32 `[M, words]` of code lanes `[C, M * 32]`."""
        return bitpack.pack_mixed(lanes, tuple((width, c.stop - c.start) for width, c, _ in self.segments))

    def unpack(self, words: Tensor) -> list[Tensor]:
        """The code lanes `[C_w, M * 32]` of each width, widest first."""
        blocks = words.shape[0]
        return [
            bitpack.unpack(words[:, part].reshape(blocks, width, channels.stop - channels.start), width)
            for width, channels, part in self.segments
        ]


def _cell(x: Tensor, width: int) -> Tensor:
    """The cell of a normal variable's quantiser that each `x` lies in."""
    borders = _borders(width, x.device)
    if x.numel() <= SEARCHED or width > COMPARED:
        return torch.bucketize(x, borders, out_int32=True)
    cell = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for border in borders:
        cell += x > border
    return cell


@cache
def _levels(width: int, device: torch.device) -> Tensor:
    return lloyd_max.normal_levels(width).float().to(device)


@cache
def _borders(width: int, device: torch.device) -> Tensor:
    return lloyd_max.normal_borders(width).float().to(device)


def _upwards(exact: Tensor) -> Tensor:
    """Nonnegative fp32 as bfloat16, rounded up: the lower half of the bits is carried into the upper one."""
    return ((exact.contiguous().view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
