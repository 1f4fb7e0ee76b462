"""Broken segmenters."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from kvframe.stages import Segmenter
from kvframe.types import Observation, Segments


class CountsColumns(Segmenter):
    """Counts chunks from the first column, so that padding moves every cut."""

    name: Literal["broken.counts_columns"] = "broken.counts_columns"
    breaks: ClassVar = ("padding_changes_nothing", "row_alone_equals_row_in_batch")

    def segment(self, observation: Observation) -> Segments:
        """Return the column // 4."""
        return Segments((torch.arange(observation.shape[-1]) // 4).int().expand(observation.valid.shape))


class LongIds(Segmenter):
    """Returns ids in int64."""

    name: Literal["broken.long_ids"] = "broken.long_ids"
    breaks: ClassVar = ("segments_partition_the_tokens",)

    def segment(self, observation: Observation) -> Segments:
        """Return zeros of the wrong type."""
        return Segments(torch.zeros(observation.valid.shape, dtype=torch.int64))
