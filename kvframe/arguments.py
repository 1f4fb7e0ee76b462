"""What users hand to the public API, held to its type where it comes in, with one sentence for what is none."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from kvframe.errors import InputError
from kvframe.naming import said


def expect(name: str, value: Any, types: type | tuple[type, ...], wanted: str) -> None:
    """Raise InputError unless `value` is of one of the types; `wanted` says what to give instead."""
    if not isinstance(value, types):
        raise InputError(f"{name} must be {wanted}, but is {said(value)}.")


def whole_number(name: str, value: Any) -> int:
    """`value` as an int. Raises InputError for what is no whole number: true and false, 1.0 and texts are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, but is {said(value)}.") from None


def whole_numbers(name: str, value: Any, wanted: str) -> Tensor:
    """`value` (a number, a sequence of numbers or a tensor) as int64 `[n]` on the CPU. Raises InputError for what is
    none, saying what was `wanted`."""
    tensor = as_tensor(name, value, wanted)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.ndim > 1:
        raise InputError(f"{name} must be {wanted}, but is {said(value)}.")
    return tensor.reshape(-1).long().cpu()


def as_tensor(name: str, value: Any, wanted: str) -> Tensor:
    """`value` as a tensor. Raises InputError for what cannot be one, saying what was `wanted`."""
    try:
        return torch.as_tensor(value)
    # Which of them torch raises depends on what it was given.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} must be {wanted}, but is {said(value)}.") from None
