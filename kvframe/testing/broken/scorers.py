"""Broken scorers."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, field_validator
from torch import Tensor

from kvframe.stages import Scorer
from kvframe.types import Observation, Segments


def key_norms(observation: Observation) -> Tensor:
    """The one thing that all of them start from, and that is right: fp32 `[L, B, H, T]`."""
    return torch.stack([layer.keys.float().norm(dim=-1) for layer in observation.layers])


class Undocumented(Scorer):
    """A field that nothing is said of."""

    name: Literal["broken.undocumented"] = "broken.undocumented"
    breaks: ClassVar = ("is_documented",)
    window: int = 3

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms."""
        return key_norms(observation)


class Doubling(Scorer):
    """A field that is not what was written down."""

    name: Literal["broken.doubling"] = "broken.doubling"
    breaks: ClassVar = ("survives_a_spec",)
    window: int = Field(4, description="Doubled whenever it is read.")

    @field_validator("window")
    @classmethod
    def _double(cls, window: int) -> int:
        return 2 * window

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms."""
        return key_norms(observation)


class Lenient(Scorer):
    """Ignores keys that it does not know: a typo in a spec goes unseen."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Literal["broken.lenient"] = "broken.lenient"
    breaks: ClassVar = ("rejects_bad_fields",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms."""
        return key_norms(observation)


class TakesNan(Scorer):
    """A number without limits, which may be not-a-number."""

    name: Literal["broken.takes_nan"] = "broken.takes_nan"
    breaks: ClassVar = ("rejects_bad_fields",)
    power: float = Field(1.0, description="Exponent of the norm.")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms to a power."""
        return key_norms(observation) ** self.power


class InPlace(Scorer):
    """Changes the cache's own values, behind the back of torch's count of writes."""

    name: Literal["broken.in_place"] = "broken.in_place"
    breaks: ClassVar = ("is_pure",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms of keys, after scaling the values where they lie."""
        for layer in observation.layers:
            layer.values.data.mul_(2)
        return key_norms(observation)


class GlobalRandom(Scorer):
    """Draws from torch's global random state: no run is like another, and sampling is disturbed."""

    name: Literal["broken.global_random"] = "broken.global_random"
    breaks: ClassVar = (
        "is_pure",
        "row_alone_equals_row_in_batch",
        "padding_changes_nothing",
        "needs_are_honoured",
        "padding_is_never_read",
    )

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return noise."""
        return torch.rand(observation.shape)


class Remembers(Scorer):
    """Mixes in the keys of the call before: scores depend on what was compressed before."""

    name: Literal["broken.remembers"] = "broken.remembers"
    breaks: ClassVar = (
        "is_pure",
        "row_alone_equals_row_in_batch",
        "padding_changes_nothing",
        "needs_are_honoured",
        "padding_is_never_read",
    )
    memory: ClassVar[dict[str, float]] = {}

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the distance of the norms to the mean norm that was seen last."""
        norms = key_norms(observation)
        last = self.memory.get("mean", 0.0)
        self.memory["mean"] = float(norms.mean())
        return (norms - last).abs()


class BatchMaximum(Scorer):
    """Divides by the largest score of the whole batch."""

    name: Literal["broken.batch_maximum"] = "broken.batch_maximum"
    breaks: ClassVar = ("row_alone_equals_row_in_batch",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms between 0 and 1."""
        norms = key_norms(observation)
        return norms / norms.masked_fill(~observation.valid[None, :, None], 0).max().clamp_min(1e-9)


class CountsColumns(Scorer):
    """Takes a column's number for a position."""

    name: Literal["broken.counts_columns"] = "broken.counts_columns"
    breaks: ClassVar = ("padding_changes_nothing", "row_alone_equals_row_in_batch")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return the column."""
        return torch.arange(observation.shape[-1], dtype=torch.float32).expand(observation.shape)


class UsesMore(Scorer):
    """Uses the surprisal if another stage happens to have asked for it."""

    name: Literal["broken.uses_more"] = "broken.uses_more"
    breaks: ClassVar = ("needs_are_honoured",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms, times 1 + surprisal."""
        norms = key_norms(observation)
        return norms if observation.surprisal is None else norms * (1 + observation.surprisal[None, :, None])


class PerQueryHead(Scorer):
    """Scores query heads: with grouped queries that is several numbers for each key that is held."""

    name: Literal["broken.per_query_head"] = "broken.per_query_head"
    breaks: ClassVar = ("scores_have_their_shape",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms, repeated for each query head."""
        return key_norms(observation).repeat_interleave(observation.model.group, dim=2)


class Negative(Scorer):
    """Scores below 0."""

    name: Literal["broken.negative"] = "broken.negative"
    breaks: ClassVar = ("scores_are_finite_and_not_negative",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return minus the norm."""
        return -key_norms(observation)


class HalfPrecision(Scorer):
    """Squares 16-bit keys in 16 bits: large ones overflow."""

    name: Literal["broken.half_precision"] = "broken.half_precision"
    breaks: ClassVar = ("scores_are_finite_and_not_negative",)

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return squared norms."""
        return torch.stack([layer.keys.square().sum(-1).float() for layer in observation.layers])


class ReadsPadding(Scorer):
    """Takes a mean over all columns, padding included."""

    name: Literal["broken.reads_padding"] = "broken.reads_padding"
    breaks: ClassVar = ("padding_is_never_read", "padding_changes_nothing", "row_alone_equals_row_in_batch")

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return distances to the mean key."""
        keys = [layer.keys.float() for layer in observation.layers]
        return torch.stack([(k - k.mean(2, keepdim=True)).norm(dim=-1) for k in keys])
