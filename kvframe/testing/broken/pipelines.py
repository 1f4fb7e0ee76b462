"""Broken specs: pipelines of sound stages with one that is not. `BROKEN` holds `(pipeline, laws that reject it)`; the
first law is the one that it was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvframe.builtin.allocators import TopK
from kvframe.builtin.encoders import Dense
from kvframe.builtin.kernels import Auto
from kvframe.builtin.scorers import Uniform
from kvframe.builtin.segmenters import Whole
from kvframe.ops import ragged_attention
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget, PipelineSpec, spec_class
from kvframe.stages import Kernel, Scorer
from kvframe.testing.broken.allocators import DropsOne, RoundsUp
from kvframe.testing.broken.scorers import ReadsPadding, Remembers, key_norms
from kvframe.types import Encoded, Entries, ModelInfo, Observation, Part, Plan, Segments


class UnlikeTheBatch(Scorer):
    """Compares a row's keys with the mean key of the whole batch."""

    name: Literal["broken.unlike_the_batch"] = "broken.unlike_the_batch"

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return distances to the batch's mean key."""
        valid = observation.valid[:, None, :, None]
        keys = [layer.keys.float() for layer in observation.layers]
        return torch.stack([(k - (k * valid).sum((0, 2), keepdim=True) / valid.sum()).norm(dim=-1) for k in keys])


class ScoresOnce(Scorer):
    """Scores a cache's first prompt and uses the same scores ever after."""

    name: Literal["broken.scores_once"] = "broken.scores_once"
    memory: ClassVar[WeakKeyDictionary[ModelInfo, Tensor]] = WeakKeyDictionary()

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms, of now or of then."""
        known = self.memory.setdefault(observation.model, key_norms(observation))
        return known if known.shape == observation.shape else known.new_ones(observation.shape)


class ChangesItsMind(Scorer):
    """Prefers long keys and short ones by turns, each time that it is asked about a model."""

    name: Literal["broken.changes_its_mind"] = "broken.changes_its_mind"
    asked: ClassVar[WeakKeyDictionary[ModelInfo, int]] = WeakKeyDictionary()

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return norms, or their reciprocals."""
        self.asked[observation.model] = times = self.asked.get(observation.model, 0) + 1
        norms = key_norms(observation)
        return norms if times % 2 else 1 / (1 + norms)


class ScalesTheModel(TopK):
    """Folds a factor into the model's own weights."""

    name: Literal["broken.scales_the_model"] = "broken.scales_the_model"  # type: ignore[assignment]

    def bind(self, model: ModelInfo) -> Any:
        """Scale the output projections."""
        for layer in range(model.layers):
            model.output_weight(layer).mul_(1.0001)


@dataclass(frozen=True, eq=False)
class EncodedAndMore(Encoded):
    """Codes with something beside them that nobody counts."""

    original: Tensor | None = None


class KeepsACopy(Dense):
    """Keeps the keys beside the codes, where the report does not see them."""

    name: Literal["broken.keeps_a_copy"] = "broken.keeps_a_copy"  # type: ignore[assignment]

    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return codes that hold a copy."""
        codes = {"keys": entries.keys, "values": entries.values}
        copied = entries.keys.clone()
        return EncodedAndMore(
            entries.offsets, codes, "dense", entries.keys.dtype, entries.log_multiplicity, None, copied
        )

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Keep parts apart."""
        return None


class BlocksDiffer(Kernel):
    """Treats a block of queries differently from a single one."""

    name: Literal["broken.blocks_differ"] = "broken.blocks_differ"

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend; the scale depends on the number of queries."""
        return ragged_attention(query, part.decode(), scale * (1.01 if query.shape[2] > 1 else 1.0), softcap=softcap)


class SinglePrecision(Auto):
    """Attends nothing but fp32."""

    name: Literal["broken.single_precision"] = "broken.single_precision"  # type: ignore[assignment]

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend, or fail."""
        if query.dtype != torch.float32:
            raise TypeError(f"expected float32, got {query.dtype}")
        return super().attend(query, part, scale, softcap)


class FirstPromptOnly(TopK):
    """Fails on anything but a text's beginning, and does not stream."""

    name: Literal["broken.first_prompt_only"] = "broken.first_prompt_only"  # type: ignore[assignment]
    streams: ClassVar[bool] = False

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens of a first prompt."""
        if int(observation.positions[observation.valid].min()) > 0:
            raise IndexError("the text does not begin here")
        return super().allocate(observation, segments, scores, budget)


class TiresOfTurns(TopK):
    """Spends half of its budget on all but a text's beginning."""

    name: Literal["broken.tires_of_turns"] = "broken.tires_of_turns"  # type: ignore[assignment]

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens, fewer of a later prompt."""
        later = int(observation.positions[observation.valid].min()) > 0
        return super().allocate(observation, segments, scores, budget // 2 if later else budget)


class PromptsOnly(TopK):
    """Fails on blocks shorter than a prompt, but declares that it streams."""

    name: Literal["broken.prompts_only"] = "broken.prompts_only"  # type: ignore[assignment]

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens of a long prompt."""
        if int(observation.positions[observation.valid].min()) > 0 and observation.shape[-1] < 16:
            raise IndexError("the block is too short")
        return super().allocate(observation, segments, scores, budget)


class Unregistered(Dense):
    """A sound encoder that no plugin registers, so that nobody else can read what it wrote."""

    name: Literal["broken.unregistered"] = "broken.unregistered"  # type: ignore[assignment]


def unreadable() -> PipelineSpec:
    """A spec with a stage that is not registered."""
    return spec_class().model_validate({"budget": {"ratio": 2}}).model_copy(update={"encoder": Unregistered()})


class DividesTheBudget(TopK):
    """Divides by the number of entries of a head, which may be 0."""

    name: Literal["broken.divides_the_budget"] = "broken.divides_the_budget"  # type: ignore[assignment]

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens."""
        count = budget // (observation.shape[0] * observation.shape[2])
        return super().allocate(observation, segments, scores, budget // count * count)


class TokensForEach(TopK):
    """Asks how many tokens come to each entry of a row, of which there may be none."""

    name: Literal["broken.tokens_for_each"] = "broken.tokens_for_each"  # type: ignore[assignment]

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the best tokens."""
        units = observation.shape[0] * observation.shape[2]
        each = units * observation.body.sum(1) // budget
        return super().allocate(observation, segments, scores, torch.where(each > 0, budget, 0))


def forgetful() -> PipelineSpec:
    """A spec that forgets its budget when it is written down."""

    class Forgetful(spec_class()):  # type: ignore[misc]
        def dump(self) -> dict[str, Any]:
            return {**super().dump(), "budget": {"ratio": 1.5}}

    return Forgetful(budget={"ratio": 2})


def _pipeline(name: str, **stages: Any) -> Pipeline:
    sound: dict[str, Any] = {
        "segmenter": Whole(),
        "scorer": Uniform(),
        "allocator": TopK(),
        "encoder": Dense(),
        "attention": Auto(),
        "budget": Budget(ratio=2),
    }
    return Pipeline(PipelineSpec(**{**sound, **stages}), f"broken-{name}")


_ALL_THAT_COMPRESS = (
    "row_alone_equals_row_in_batch",
    "pieces_give_each_row_what_it_gives_alone",
    "padding_changes_nothing",
    "caches_in_turn_equal_each_alone",
    "a_reset_cache_is_as_new",
    "the_model_stays_as_it_was",
    "bytes_are_as_reported",
    "decoding_steps_equal_one_block",
    "a_second_prompt_is_compressed",
    "tiny_prompts_are_served",
    "too_short_prompts_keep_what_is_protected",
    "a_step_that_breaks_off_leaves_no_trace",
    "mixed_precision_is_served",
)
_ALL_THAT_COMPARE = (
    "full_budget_is_full_attention",
    "row_alone_equals_row_in_batch",
    "pieces_give_each_row_what_it_gives_alone",
    "padding_changes_nothing",
    "caches_in_turn_equal_each_alone",
    "a_reset_cache_is_as_new",
    "decoding_steps_equal_one_block",
)

BROKEN: tuple[tuple[Pipeline, tuple[str, ...]], ...] = (
    (
        _pipeline("changes-its-mind", scorer=ChangesItsMind()),
        ("a_step_that_breaks_off_leaves_no_trace", "a_reset_cache_is_as_new"),
    ),
    (_pipeline("single-precision", attention=SinglePrecision()), ("mixed_precision_is_served",)),
    (Pipeline(forgetful(), "broken-forgetful"), ("survives_a_file", "a_saved_cache_goes_on")),
    (
        _pipeline("drops-one", allocator=DropsOne()),
        ("full_budget_is_full_attention", "turns_that_lose_nothing_are_one_prompt", "mixed_precision_is_served"),
    ),
    (
        _pipeline("unlike-the-batch", scorer=UnlikeTheBatch()),
        ("pieces_give_each_row_what_it_gives_alone", "row_alone_equals_row_in_batch"),
    ),
    (
        _pipeline("reads-padding", scorer=ReadsPadding()),
        (
            "padding_changes_nothing",
            "row_alone_equals_row_in_batch",
            "pieces_give_each_row_what_it_gives_alone",
        ),
    ),
    (
        _pipeline("remembers", scorer=Remembers()),
        (
            "caches_in_turn_equal_each_alone",
            "a_reset_cache_is_as_new",
            "row_alone_equals_row_in_batch",
            "pieces_give_each_row_what_it_gives_alone",
            "padding_changes_nothing",
            "decoding_steps_equal_one_block",
            "a_step_that_breaks_off_leaves_no_trace",
        ),
    ),
    (_pipeline("scores-once", scorer=ScoresOnce()), ("a_reset_cache_is_as_new",)),
    (
        _pipeline("scales-the-model", allocator=ScalesTheModel()),
        (
            "the_model_stays_as_it_was",
            *_ALL_THAT_COMPARE,
            "too_short_prompts_keep_what_is_protected",
            "a_step_that_breaks_off_leaves_no_trace",
        ),
    ),
    (_pipeline("keeps-a-copy", encoder=KeepsACopy()), ("bytes_are_as_reported",)),
    # The pipeline refuses the plan, so nothing that compresses can be run.
    (_pipeline("rounds-up", allocator=RoundsUp()), ("budget_is_respected", *_ALL_THAT_COMPRESS)),
    (
        _pipeline("blocks-differ", attention=BlocksDiffer()),
        ("decoding_steps_equal_one_block", "turns_that_lose_nothing_are_one_prompt"),
    ),
    (_pipeline("tires-of-turns", allocator=TiresOfTurns()), ("turns_that_lose_nothing_are_one_prompt",)),
    (_pipeline("prompts-only", allocator=PromptsOnly()), ("flushing_stays_within_budget",)),
    (
        _pipeline("first-prompt-only", allocator=FirstPromptOnly()),
        (
            "a_second_prompt_is_compressed",
            "turns_that_lose_nothing_are_one_prompt",
            "a_step_that_breaks_off_leaves_no_trace",
        ),
    ),
    (Pipeline(unreadable(), "broken-unreadable"), ("a_saved_cache_goes_on", "survives_a_file")),
    (
        _pipeline("divides-the-budget", allocator=DividesTheBudget()),
        ("tiny_prompts_are_served", "too_short_prompts_keep_what_is_protected"),
    ),
    (_pipeline("tokens-for-each", allocator=TokensForEach()), ("too_short_prompts_keep_what_is_protected",)),
)
