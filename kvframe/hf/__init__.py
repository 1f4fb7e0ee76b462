"""kvframe on transformers: the cache, and loading models."""

from kvframe.hf.cache import CompressedCache
from kvframe.hf.info import model_info
from kvframe.hf.models import load_model
from kvframe.hf.prefill import Prefill
from kvframe.hf.saved import load_cache

__all__ = ["CompressedCache", "Prefill", "load_cache", "load_model", "model_info"]
