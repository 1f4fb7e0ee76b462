"""kvframe: composable KV-cache compression for Hugging Face models.

pipeline = kvframe.load("snapkv", overrides={"budget.ratio": 4})
cache = pipeline.cache(model)
model.generate(**inputs, past_key_values=cache)
print(cache.report())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvframe.hf import load_cache
    from kvframe.hookspecs import hookimpl
    from kvframe.pipeline import Pipeline, load

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__", "hookimpl", "load", "load_cache"]

_HOME = {
    "Pipeline": "kvframe.pipeline",
    "load": "kvframe.pipeline",
    "load_cache": "kvframe.hf",
    "hookimpl": "kvframe.hookspecs",
}


def __getattr__(name: str) -> Any:
    # torch and pydantic take a second to import: they wait until something is used.
    if name not in _HOME:
        raise AttributeError(f"module 'kvframe' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
