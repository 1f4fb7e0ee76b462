"""The best scalar quantisers of normal variables."""

from kvframe.ops.lloyd_max.reference import normal_borders, normal_levels

__all__ = ["normal_borders", "normal_levels"]
