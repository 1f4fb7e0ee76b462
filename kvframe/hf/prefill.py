"""One prefill for several pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from transformers import PreTrainedModel

from kvframe.arguments import expect
from kvframe.budget import Lengths
from kvframe.errors import InputError
from kvframe.hf.cache import CompressedCache
from kvframe.pipeline import Pipeline, load
from kvframe.types import Needs


class Prefill(CompressedCache):
    """A prompt read once: run the model with `cache=prefill`, then `fork` a cache for each of the pipelines.

    It observes what any of them needs and compresses nothing itself."""

    def __init__(self, model: PreTrainedModel, pipelines: Iterable[Pipeline], *, needs: Needs | None = None) -> None:
        expect("pipelines", pipelines, Iterable, "a list of pipelines")
        pipelines = list(pipelines)
        for pipeline in pipelines:
            expect("Each of the pipelines", pipeline, Pipeline, "what kvframe.load returns")
        needs = reduce(or_, (pipeline.needs for pipeline in pipelines), needs or Needs())
        super().__init__(load("identity"), model, needs=needs)

    def _compress(self, suffix_length: Lengths, prompt: bool, reading: int | None = None) -> None:
        """Do nothing: this cache stays whole."""

    def fork(
        self, pipeline: Pipeline | None = None, prefix_length: Lengths = 0, suffix_length: Lengths | None = None
    ) -> CompressedCache:
        """A cache for `pipeline` that has seen what this one has; without a pipeline, a second prefill. Storage is
        shared until one of them writes. Raises InputError for a pipeline that needs what was not observed."""
        if pipeline is None:
            other: CompressedCache = Prefill(self.live_model(), [], needs=self.needs)
        else:
            expect("pipeline", pipeline, Pipeline, "what kvframe.load returns")
            if self.needs | pipeline.needs != self.needs:
                raise InputError(
                    f"'{pipeline.name}' needs {pipeline.needs}, but this prefill observed {self.needs}; "
                    "give the pipeline to Prefill(model, pipelines)."
                )
            other = CompressedCache(pipeline, self.live_model(), prefix_length, suffix_length, needs=self.needs)
        self._hand_over(other)
        return other
