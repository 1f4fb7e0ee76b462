"""A pipeline: the stages of a spec, run in order on an observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvframe import capping, grading
from kvframe.arguments import expect
from kvframe.budget import Lengths
from kvframe.contracts import Untouched, blaming, check_encoded, check_plan_fields, check_states
from kvframe.errors import StageError
from kvframe.execute import check_plan, execute
from kvframe.placement import gathered, on, spread
from kvframe.ragged import append_part
from kvframe.spec import PipelineSpec, read_spec
from kvframe.split import QUERIES
from kvframe.stages import Encoder, Stage
from kvframe.types import (
    Encoded,
    Entries,
    Grades,
    LayerPlan,
    ModelInfo,
    Needs,
    Observation,
    Part,
    Plan,
    Segments,
    check_shape,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvframe.hf.cache import CompressedCache

Returned = TypeVar("Returned")


@dataclass(frozen=True, eq=False)
class Compressed:
    """What a pipeline made of an observation: the parts of each layer, the plan they follow, the encoder's states; None
    if nothing was coded yet."""

    parts: tuple[tuple[Part, ...], ...]
    plan: Plan
    states: Sequence[Any] | None


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages of a spec, ready to run. It holds no state: what a cache learns lives in the cache."""

    spec: PipelineSpec
    name: str = "pipeline"

    def __post_init__(self) -> None:
        expect("spec", self.spec, PipelineSpec, "a PipelineSpec (kvframe.load makes a pipeline of a spec's name)")

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they run."""
        spec = self.spec
        return (spec.segmenter, spec.scorer, spec.allocator, spec.encoder, spec.attention)

    @cached_property
    def needs(self) -> Needs:
        """What must be observed for all stages, and to choose a width."""
        needs = Needs()
        for stage in self.stages:
            with blaming(stage):
                needs |= returned(stage, stage.needs, Needs)
        return needs if len(self.variants) == 1 else needs | Needs(queries=QUERIES)

    @cached_property
    def variants(self) -> tuple[Pipeline, ...]:
        """The pipelines to choose among, one for each width that the encoder leaves open; else this one alone."""
        encoders = self.spec.encoder.widths()
        if len(encoders) == 1:
            return (self,)
        return tuple(Pipeline(self.spec.model_copy(update={"encoder": each}), self.name) for each in encoders)

    @cached_property
    def encoders(self) -> tuple[Encoder, ...]:
        """The encoder, or those of its grades, the cheapest first."""
        return grading.offered(self.spec.encoder)

    @property
    def paid_block(self) -> int:
        """Entries of a head that a prompt pays for together: whole blocks where the encoder has several grades."""
        return self.encoders[0].block if len(self.encoders) > 1 else 1

    def bind(self, model: ModelInfo) -> Any:
        """Let every stage check the model; return what the encoder loaded for it, for each of several `variants` by
        itself. Raises what the stages raise."""
        if len(self.variants) > 1:
            return [variant.bind(model) for variant in self.variants]
        capping.check(self.spec.attention, model)
        for stage in self.stages:
            if stage is not self.spec.encoder:
                with blaming(stage):
                    stage.bind(model)
        return grading.bind(self.encoders, model)

    def entry_bits(self, model: ModelInfo, itemsize: int) -> float:
        """Bits that one entry of the body costs, of the dearest grade."""
        return self.grade_bits(model, itemsize)[-1]

    def grade_bits(self, model: ModelInfo, itemsize: int) -> tuple[float, ...]:
        """Bits that one entry of the body costs in each grade: the encoder's, and the metadata held with it."""
        with blaming(self.spec.encoder):
            coded = [encoder.bits_per_entry(model, itemsize) for encoder in self.encoders]
            position = self.spec.encoder.position_bits(model) if self.holds_positions(model) else 0
        return tuple(bits + 32 * self.spec.allocator.merges + position for bits in coded)

    def holds_positions(self, model: ModelInfo) -> bool:
        """Whether the body's entries keep their positions: for decoding, or to be grouped again."""
        return self.spec.allocator.regroups or self.spec.encoder.holds_positions(model)

    def plan(self, observation: Observation, budget: Tensor, grades: Grades | None = None) -> Plan:
        """Run segmenter, scorer and allocator. `budget` int64 `[B]`, see Allocator.allocate; `grades` are those that
        the encoder offers for single entries, None = only one. Raises StageError, naming the stage, if one fails or
        returns what its contract forbids."""
        spec, untouched = self.spec, Untouched(observation, budget=budget)
        with blaming(spec.segmenter):
            segments = returned(spec.segmenter, spec.segmenter.segment(observation), Segments)
        check_shape(f"segmenter '{spec.segmenter.name}': Segments", "ids", segments.ids, tuple(observation.valid.shape))
        untouched.check(spec.segmenter)
        with blaming(spec.scorer):
            scores = returned(spec.scorer, spec.scorer.score(observation, segments), Tensor)
        untouched.check(spec.scorer)
        check_shape(f"scorer '{spec.scorer.name}'", "scores", scores, observation.shape)
        if scores.device != observation.valid.device:
            raise StageError(
                f"scorer '{spec.scorer.name}' returned scores on {scores.device}, but the observation is on "
                f"{observation.valid.device}; make new tensors with device=observation.valid.device."
            )
        scores = torch.where(observation.body[None, :, None], scores, scores.new_zeros(()))
        if scores.dtype != torch.float32 or not bool(((scores >= 0) & scores.isfinite()).all()):
            raise StageError(
                f"scorer '{spec.scorer.name}' must return finite fp32 scores >= 0, but returned {scores.dtype} between "
                f"{scores.min():.4g} and {scores.max():.4g}."
            )
        untouched = Untouched(observation, budget=budget, scores=scores, segments=segments.ids)
        with blaming(spec.allocator):
            if grades is None:
                plan = spec.allocator.allocate(observation, segments, scores, budget)
            else:
                plan = spec.allocator.allocate_graded(observation, segments, scores, budget, grades)
            plan = returned(spec.allocator, plan, Plan)
            untouched.check(spec.allocator)
            check_plan_fields(plan, observation, f"allocator '{spec.allocator.name}'", grades)
            body = observation.model.layers * observation.model.kv_heads * observation.body.sum(1)
            limit = body if spec.allocator.keeps_all else budget
            check_plan(plan, observation, limit, f"allocator '{spec.allocator.name}'", grades)
        return plan

    def run(
        self,
        observation: Observation,
        budget: Tensor,
        sinks: Tensor | None = None,
        states: Sequence[Any] | None = None,
        bound: Any = None,
        block: int | None = None,
    ) -> Compressed:
        """Compress the observation's body; keep the tokens where `sinks` (bool `[B, T]`) is True exactly. Layers may be
        on several devices: what is made of one stays on its own.

        `states` are the encoder's from an earlier run; None = fit on this observation and on `bound`, which `bind`
        returned. Entries of several grades are paid for in blocks of `block`; None = `paid_block`. Raises StageError,
        naming the stage, if one fails, returns what its contract forbids or writes into what it was given."""
        plan, states = self._decide(gathered(observation), budget, states, bound, block)
        devices = [layer.keys.device for layer in observation.layers]
        states = None if states is None else spread(states, devices)
        layers, held = [], self.holds_positions(observation.model)
        for index, (layer, device) in enumerate(zip(observation.layers, devices, strict=True)):
            parts: tuple[Part, ...] = ()
            rope = observation.model.rope[index]
            positions = on(observation.positions, device)
            if sinks is not None and bool(sinks.any()):
                kept = LayerPlan.keep(on(sinks, device)[:, None].expand(observation.shape[1:]))
                parts = (exact_part(execute(kept, layer, positions, rope)),)
            planned = on(plan.layers[index], device)
            entries = execute(planned, layer, positions, rope)
            if not held:
                entries = replace(entries, positions=None)
            own = None if states is None else states[index]
            for encoder, some, state in grading.by_grade(planned, entries, self.encoders, own):
                untouched = Untouched(some)
                with blaming(encoder):
                    encoded = returned(encoder, encoder.encode(some, state), Encoded)
                    untouched.check(encoder)
                    check_encoded(encoded, some, encoder)
                    parts = append_part(parts, Part(encoded, encoder, state))
            layers.append(parts)
        return Compressed(tuple(layers), plan, states)

    def _decide(
        self, observation: Observation, budget: Tensor, states: Sequence[Any] | None, bound: Any, block: int | None
    ) -> tuple[Plan, Sequence[Any] | None]:
        """The plan, and the encoder's states, one a layer."""
        if states is None and not self.spec.allocator.keeps_all and not bool(budget.any()):
            # Nothing can be kept of the body, so nothing is learned from it either: more may come, to learn from.
            nothing = torch.zeros(observation.shape[1:], dtype=torch.bool, device=observation.valid.device)
            return Plan((LayerPlan.keep(nothing),) * observation.model.layers), None
        encoder, untouched = self.spec.encoder, Untouched(observation)
        with blaming(encoder):
            states = grading.fit(self.encoders, observation, bound) if states is None else states
            untouched.check(encoder)
            check_states(states, observation, encoder)
        if len(self.encoders) == 1:
            return self.plan(observation, budget), states
        bits = self.grade_bits(observation.model, observation.layers[0].keys.element_size())
        grades = grading.grades(self.encoders, states, bits)
        block = self.paid_block if block is None else block
        grades = replace(grades, error=grades.error.to(observation.valid.device), block=block)
        return self.plan(observation, budget, grades), states

    def cache(
        self, model: PreTrainedModel, prefix_length: Lengths = 0, suffix_length: Lengths | None = None
    ) -> CompressedCache:
        """A cache for `model.generate(..., cache=cache)`.

        `prefix_length` and `suffix_length` (one number, or one a row) count the tokens of the prompt's template prefix
        and of the question: kept exactly, not charged. Nothing is set on the model, which reads one token twice when
        its first cache is made. Raises ModelError if its attention is not one that kvframe knows."""
        from kvframe.hf.cache import CompressedCache

        return CompressedCache(self, model, prefix_length, suffix_length)


def returned(stage: Stage, value: Any, expected: type[Returned]) -> Returned:
    """`value`, which `stage` returned. Raises StageError if it is of another type."""
    if not isinstance(value, expected):
        found = "None; is a return missing?" if value is None else f"{type(value).__name__}."
        raise StageError(f"{stage.kind} '{stage.name}' must return {expected.__name__}, but returned {found}")
    return value


def exact_part(entries: Entries) -> Part:
    """Entries held as they are."""
    from kvframe.builtin.encoders import Dense

    dense = Dense()
    return Part(dense.encode(replace(entries, positions=None), ()), dense)


def load(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Pipeline:
    """Load a pipeline: a spec's name (str) or file (pathlib.Path), with `overrides` such as {"budget.ratio": 8}.

    Raises SpecError, naming what is wrong and the nearest valid name."""
    expect("A pipeline's source", source, (str, Path), "the name of a spec (str) or a file (pathlib.Path)")
    name = source.stem if isinstance(source, Path) else source
    return Pipeline(read_spec(source, overrides), name)
