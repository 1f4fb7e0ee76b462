"""The output projection and the biases of an attention module, as numbers, whatever class their layers are of: plain
weights are read, everything else (quantised layers, adapters) is asked for its response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvframe.errors import ModelError

# What attention modules of transformers call their output projection.
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
ROWS = 256  # unit inputs that go through a layer at once
# A layer that rounds its weights, or its inputs, to few bits is still linear for our purpose.
NONLINEAR = 0.05


def output_projection(attention: Any) -> nn.Module | None:
    """The module that takes the heads' outputs back to the residual stream, None if there is none of a known name."""
    found = (getattr(attention, name, None) for name in OUTPUTS)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def held(module: nn.Module, name: str) -> Tensor:
    """A module's "weight" or "bias", also while accelerate keeps it elsewhere between calls."""
    kept: Any = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    tensor: Tensor = getattr(module, name).detach()
    return kept[name] if tensor.is_meta and kept is not None else tensor


def is_plain(module: nn.Module) -> bool:
    """Whether a linear layer multiplies with the numbers in its weight: subclasses may keep packed codes there."""
    weight = getattr(module, "weight", None)
    if type(module) not in (nn.Linear, Conv1D) or not isinstance(weight, Tensor) or type(weight.data) is not Tensor:
        return False
    # accelerate puts a forward of its own on a module, and so do some libraries that change what it computes.
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return False
    shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else (weight.shape[0], module.nf)
    return weight.is_floating_point() and weight.element_size() > 1 and tuple(weight.shape) == shape


def linear_weight(module: nn.Module, inputs: int, like: Tensor) -> Tensor:
    """The matrix `[inputs, outputs]` that a linear layer multiplies with: its weight, or its response to unit inputs,
    `ROWS` of them at a time, given in the dtype and on the device of `like`."""
    if is_plain(module):
        weight = held(module, "weight")
        return weight.T if isinstance(module, nn.Linear) else weight
    with _quietly(module):
        zero = module(like.new_zeros(1, inputs))
        rows = []
        for begin in range(0, inputs, ROWS):
            unit = torch.eye(min(ROWS, inputs - begin), inputs, dtype=like.dtype, device=like.device)
            rows.append(module(unit.roll(begin, 1)) - zero)
    return torch.cat(rows)


def linear_bias(module: nn.Module, inputs: int, like: Tensor) -> Tensor:
    """What a linear layer adds, `[outputs]`: its bias, or its response to nothing; see `linear_weight`."""
    if is_plain(module) and getattr(module, "bias", None) is not None:
        return held(module, "bias")
    with _quietly(module):
        bias: Tensor = module(like.new_zeros(1, inputs))[0]
    return bias


def check_linear(module: nn.Module, inputs: int, outputs: int, like: Tensor, owner: str) -> None:
    """Raise ModelError unless a layer takes `inputs` channels to `outputs` and its response to a sum is the sum of its
    responses, but for rounding to few bits. `owner` says whose layer it is."""
    if is_plain(module):
        return
    kind = type(module).__name__
    remedy = (
        "load the model without quantising that layer, or, if it is an adapter, merge it into the model "
        "(merge_adapter, or merge_and_unload of PEFT)"
    )
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, inputs, generator=generator).to(like) for _ in range(2))
    try:
        with _quietly(module):
            zero, a, b, both = (module(x).float() for x in (first * 0, first, second, first + second))
    # Whatever class the layer is of may fail with anything.
    except Exception as error:
        raise ModelError(
            f"The output projection of {owner} is a {kind}, which does not take {inputs} channels by itself "
            f"({type(error).__name__}: {error}), so kvframe cannot know its weights; {remedy}."
        ) from error
    size = max(float((a - zero).norm()), float((b - zero).norm()))
    wrong = float((a + b - both - zero).norm())
    if a.shape != (1, outputs) or not wrong <= NONLINEAR * size + 1e-6:
        raise ModelError(
            f"The output projection of {owner} is a {kind}, whose response is not that of a matrix of {inputs} by "
            f"{outputs}, so kvframe cannot know its weights; {remedy}."
        )


@contextmanager
def _quietly(module: nn.Module) -> Iterator[None]:
    """Without gradients and without what a layer does in training only (dropout of adapters)."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
