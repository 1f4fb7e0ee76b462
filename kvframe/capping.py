"""Soft caps on logits: what kernels and encoders are told of a model's, and which of them can be told."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvframe.errors import ModelError

if TYPE_CHECKING:
    from kvframe.stages import Encoder, Kernel
    from kvframe.types import ModelInfo


def keywords(softcap: float | None) -> dict[str, float]:
    """What an `attend` is given besides: nothing without a cap, so that one that knows of no caps works."""
    return {} if softcap is None else {"softcap": softcap}


@torch.compiler.assume_constant_result
def takes(stage: type[Encoder | Kernel]) -> bool:
    """Whether the method `attend` of a class of stages has the argument `softcap`."""
    return _takes(stage)


@cache
def _takes(stage: type[Encoder | Kernel]) -> bool:
    parameters = inspect.signature(stage.attend).parameters.values()
    return any(p.name == "softcap" or p.kind is p.VAR_KEYWORD for p in parameters)


def check(kernel: Kernel, model: ModelInfo) -> None:
    """Raise ModelError for a kernel that cannot attend a model whose logits are capped."""
    if model.softcap is not None and not takes(type(kernel)):
        raise ModelError(
            f"{model.name} caps its attention's logits at {model.softcap:g}, but attention '{kernel.name}' does not "
            "take a cap; add the argument softcap: float | None = None to its attend, or use attention: auto."
        )
