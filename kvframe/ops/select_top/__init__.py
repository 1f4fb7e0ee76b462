"""The highest scores of each row, as a mask."""

from kvframe.ops.select_top.reference import select_top

__all__ = ["select_top"]
