"""Which rotation a layer applies to its keys: that of the model's own rotary modules, or none, whichever is seen in the
keys that it really puts into its cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvframe.rope import Rope

# Their frequencies change with the length of what is read, so what was cached cannot be turned back.
CHANGING = ("dynamic", "longrope")
SUFFIX = "inv_freq"


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation that some module of the model offers, and the type that the model says it is of. `interleaved`: it
    turns channels `2i` and `2i + 1` together, where Rope pairs `i` and `i + R/2`."""

    rope: Rope
    kind: str
    interleaved: bool = False

    def order(self, dim: int) -> Tensor:
        """The model's channels in the order in which Rope turns them, int64 `[D]`."""
        turned, channels = 2 * len(self.rope.inv_freq), torch.arange(dim)
        if not self.interleaved:
            return channels
        return torch.cat([channels[:turned:2], channels[1:turned:2], channels[turned:]])


NONE = Rotation(Rope(torch.empty(0)), "none")


def offered(model: nn.Module) -> list[Rotation]:
    """The rotations of the model's rotary modules; one module may hold several, under a prefix each."""
    return [rotation for module in model.modules() for rotation in _of(module)]


def _of(module: Any) -> Iterator[Rotation]:
    for name, tensor in module.named_buffers(recurse=False):
        if name.endswith(SUFFIX) and "original" not in name and tensor.ndim == 1:
            prefix = name.removesuffix(SUFFIX)
            kinds = getattr(module, "rope_type", "default")
            kind = kinds.get(prefix.rstrip("_"), "default") if isinstance(kinds, dict) else kinds
            scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
            yield Rotation(Rope(tensor.detach().float(), scaling), str(kind))


def likeliest(rotations: list[Rotation], keys: Tensor, positions: tuple[int, int], noise: float) -> Rotation | None:
    """The rotation under which two keys `[2, H, D]` of the same token at two positions are the same before it, or no
    rotation; None if they are not under any. `noise` is the relative difference of what should be equal.

    The model rounds the cosines, their products and the sums to its dtype, a few units in all."""
    fitting = [rotation for rotation in rotations if 2 * len(rotation.rope.inv_freq) <= keys.shape[-1]]
    at = [torch.tensor([[position]], device=keys.device) for position in positions]
    size = float(keys.float().abs().max())
    best, least = None, (16 * max(torch.finfo(keys.dtype).eps, 1e-5) + 4 * noise) * size
    for rotation in (*fitting, *(replace(rotation, interleaved=True) for rotation in fitting), NONE):
        rope = Rope(rotation.rope.inv_freq.to(keys.device), rotation.rope.scaling)
        turned = keys[..., rotation.order(keys.shape[-1]).to(keys.device)].float()
        plain = rope.unrotate(turned[:1], at[0])
        error = float((rope.rotate(plain, at[1]) - turned[1:]).abs().max())
        if error < least or (best is None and error <= least):
            best, least = rotation, error
    return best
