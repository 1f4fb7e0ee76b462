"""Mixed precision: under `torch.autocast` keys, values and queries come in different dtypes. A cache holds keys and
values in one, and computes in those that its code names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

KINDS = ("cpu", "cuda", "mps", "xpu")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of autocast, which would round what is meant to be fp32."""

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        enabled = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
        if not enabled:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return plain


def common_dtype(keys: Tensor, values: Tensor) -> torch.dtype:
    """The dtype to hold keys and values in: the one that the model's attention would compute in."""
    kind = keys.device.type
    wide = torch.promote_types(keys.dtype, values.dtype)
    # Autocast leaves fp64 as it is.
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and wide != torch.float64 else wide
