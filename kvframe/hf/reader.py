"""A cache that shows what it saw, for stages that must be calibrated."""

from __future__ import annotations

from transformers import PreTrainedModel

from kvframe.budget import Lengths, split_regions
from kvframe.errors import InputError
from kvframe.hf.cache import CompressedCache
from kvframe.pipeline import load
from kvframe.placement import gathered
from kvframe.spec import Protect
from kvframe.types import Needs, Observation


class Reader(CompressedCache):
    """Reads one prompt, observes what `needs` asks for, and compresses nothing."""

    def __init__(self, model: PreTrainedModel, needs: Needs) -> None:
        super().__init__(load("identity"), model, needs=needs)

    def _compress(self, suffix_length: Lengths, prompt: bool, reading: int | None = None) -> None:
        """Do nothing: this cache stays whole."""

    def observation(self, sinks: int) -> Observation:
        """What was seen. Its body is everything but the first `sinks` tokens of each row. Raises InputError if nothing
        was read yet."""
        if self.valid is None:
            raise InputError("Nothing was read yet; run the model with this cache first.")
        return gathered(self.observe(split_regions(self.valid, Protect(sink=sinks, recent=0)), self.needs))
