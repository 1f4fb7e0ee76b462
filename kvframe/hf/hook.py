"""Hooks on a model that are a cache's: what becomes of the model without the cache does not have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


class Hook:
    """A forward hook or pre-hook. A deep copy or a pickle of its module holds a hook in its place that does nothing and
    needs no kvframe; a graph that is compiled or exported is made without it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # The one callable of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


def called_with(owner: weakref.ref[CompressedCache], kwargs: dict[str, Any]) -> CompressedCache | None:
    """The cache that a hook belongs to, if a module was called with it."""
    cache = kwargs.get("cache")
    cache = cache if cache is not None else kwargs.get("past_key_values")
    return cache if cache is owner() else None
