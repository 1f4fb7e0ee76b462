"""A scorer that asks for everything, and tells what it was shown."""

from __future__ import annotations

from typing import Literal

import torch

import kvframe
from kvframe.builtin.allocators import TopK
from kvframe.pipeline import Pipeline
from kvframe.spec import PipelineSpec
from kvframe.stages import Scorer
from kvframe.types import Needs

SEEN = []


class Curious(Scorer):
    """Asks for everything and keeps the observation for the test."""

    name: Literal["curious"] = "curious"

    @property
    def needs(self):
        return Needs(queries="all", head_outputs=5, hidden_states=(0.0, 0.4, 0.9), surprisal=True)

    def score(self, observation, segments):
        SEEN.append(observation)
        return torch.ones(observation.shape, device=observation.valid.device)


def curious_pipeline(**changes):
    plain = kvframe.load("identity").spec
    fields = {name: getattr(plain, name) for name in type(plain).model_fields}
    fields |= {"scorer": Curious(), "allocator": TopK(), **changes}
    return Pipeline(PipelineSpec.model_construct(**fields))
