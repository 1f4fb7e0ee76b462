"""Weighted sum of rows over segments."""

from kvframe.ops.segment_pool.reference import segment_pool

__all__ = ["segment_pool"]
