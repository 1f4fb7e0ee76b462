"""kvframe on transformers: the cache, and loading models."""

from kvframe.hf.cache import CompressedCache, Prefill
from kvframe.hf.info import model_info
from kvframe.hf.models import load_model

__all__ = ["CompressedCache", "Prefill", "load_model", "model_info"]
