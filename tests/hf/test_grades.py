"""Entries of several grades: each coded as its plan says, within the bytes, through a cache's whole life."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch
from tiny import batch, observation, tiny_model

import kvframe
from kvframe.builtin.encoders import Dense, Int8
from kvframe.errors import SpecError, StageError
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget, PipelineSpec
from kvframe.stages import Allocator
from kvframe.types import Grades, LayerPlan, Plan

SMALL = {"protect.recent": 5, "protect.sink": 2, "scorer": {"name": "baselines.snapkv", "window": 7}}
AATC = {"name": "aatc.transform", "calibration": "prompt", "offers": [1, 2, 4]}
GRADED = {**SMALL, "allocator": "graded", "encoder": AATC, "budget": {"ratio": 5, "of": "bytes"}}


class Coarse(Int8):
    """Loses a known share."""

    def error(self, state):
        return 0.1


class TwoGrades(Dense):
    """Eight bits, or all of them."""

    name: Literal["two"] = "two"  # type: ignore[assignment]

    def grades(self):
        return (Coarse(), Dense())


class Fixed(Allocator):
    """Gives tokens the grades 0, 1, dropped, 0, 1, … and can be told to do wrong."""

    name: Literal["fixed"] = "fixed"
    merges: ClassVar[bool] = False
    chooses_grades: ClassVar[bool] = True
    wrong: str = ""

    def allocate(self, observation, segments, scores, budget):
        raise NotImplementedError

    def allocate_graded(self, observation, segments, scores, budget, grades):
        number = observation.body.cumsum(1) % 3 - 1
        grade = torch.where(observation.body, number, -1)[:, None].expand(observation.shape[1:])
        plan = LayerPlan.graded(grade)
        if self.wrong == "none":
            plan = LayerPlan.keep(grade >= 0)
        if self.wrong == "unknown":
            plan = LayerPlan.graded(torch.where(grade == 1, 2, grade))
        if self.wrong == "dear":
            plan = LayerPlan.graded(torch.where(observation.body, 1, -1)[:, None].expand(observation.shape[1:]))
        return Plan((plan,) * observation.shape[0])


def fixed(wrong="", ratio=1.5):
    spec = kvframe.load("identity", SMALL).spec
    stages = {"encoder": TwoGrades(), "allocator": Fixed(wrong=wrong), "budget": Budget(ratio=ratio, of="bytes")}
    return Pipeline(spec.model_copy(update=stages))


def prompted(pipeline, lengths=(70, 41)):
    model, inputs = tiny_model("llama"), batch(list(lengths))
    cache = pipeline.cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, cache=cache)
    return model, inputs, cache


def test_each_entry_is_coded_with_its_grade():
    _, inputs, cache = prompted(fixed())
    exact = [layer.recent.keys.clone() for layer in cache.compressed_layers]
    cache.compress()
    valid = inputs["attention_mask"].bool()
    for layer, keys in zip(cache.compressed_layers, exact, strict=True):
        # The sinks are dense as well, and stand before the dense grade.
        fine, coarse = layer.parts
        assert [type(part.encoder).__name__ for part in (coarse, fine)] == ["Coarse", "Dense"]
        for row in range(2):
            columns = valid[row].nonzero()[2:-5, 0]  # without sinks and recent tokens
            number = torch.arange(1, len(columns) + 1) % 3 - 1
            for part, grade, before, limit in ((coarse, 0, 0, 1 / 127), (fine, 1, 2, 0.0)):
                held = part.decode()
                for head in range(2):
                    begin, end = held.bounds[row * 2 + head] + before, held.bounds[row * 2 + head + 1]
                    wanted = keys[row, head, columns[number == grade]]
                    # Half a step of the code, and its bf16 scale.
                    assert float((held.keys[begin:end] - wanted).abs().max()) <= limit * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("none", "say which of the encoder's grades"), ("unknown", "from 0 to 1"), ("dear", "cost")],
)
def test_a_plan_that_breaks_the_contract_is_refused_and_nothing_is_lost(wrong, says):
    model, _, cache = prompted(fixed(wrong))
    with pytest.raises(StageError, match=says):
        cache.compress()
    assert cache.compressed_layers[0].recent.length == 70
    assert model is not None


@pytest.mark.parametrize("ratio", [8, 12, 16])
def test_the_bytes_are_what_the_budget_says(ratio):
    overrides = {**GRADED, "budget.ratio": ratio}
    model, inputs = tiny_model("llama", max_position_embeddings=2048), batch([700, 650])
    cache = kvframe.load("identity", overrides).cache(model)
    model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp_min(0), cache=cache)
    cache.compress()
    report = cache.report()
    # What is fitted to the prompt, and what was watched, belongs to no entry; padding has none either.
    held = report.bytes_by_part["compressed"] + report.bytes_by_part["recent"]
    full = report.full_bytes * 1350 / 1400
    assert 0.9 * full / ratio <= held <= 1.03 * full / ratio
    assert report.entry_ratio < ratio
    assert f"in bytes (asked {ratio})" in str(report)
    assert "in entries (asked" not in str(report)


def test_blocks_of_an_answer_join_the_parts_of_their_grades():
    model, inputs, cache = prompted(kvframe.load("identity", {**GRADED, "decode.flush": 8}))
    mask = inputs["attention_mask"]
    for token in range(40):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids, positions = torch.full((2, 1), 5 + token), mask.sum(1, keepdim=True) - 1
        assert bool(model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits.isfinite().all())
    assert cache.ledger.compressions > 3
    for layer in cache.compressed_layers:
        # Sinks and three grades; now and then codes stay apart, where their positions would take more room together.
        assert len(layer.parts) <= 6


@pytest.mark.parametrize("lengths", [(40, 41), (8, 9)])
def test_a_budget_that_pays_for_everything_keeps_it_in_the_best_grade(lengths):
    """The last block of a head is rarely full, and it costs as much as a full one."""
    _, _, cache = prompted(kvframe.load("identity", {**GRADED, "budget": {"bytes": "1GiB"}}), lengths)
    cache.compress()
    for layer in cache.compressed_layers:
        assert [part.encoder.key_bits for part in layer.parts[1:]] == [4]
        assert int(layer.parts[1].encoded.offsets[-1]) == 2 * (sum(lengths) - 2 * 7)


def test_a_few_tokens_of_an_answer_do_not_pay_for_a_block():
    """A prompt that is shorter than what is protected is first compressed with its answer: all that the budget pays
    for is kept, whatever else is in the batch."""
    overrides = {**GRADED, "decode.flush": 8, "budget.ratio": 1, "encoder": {**AATC, "offers": [2, 4]}}
    for lengths in ((3,), (3, 41)):
        model, inputs, cache = prompted(kvframe.load("identity", overrides), lengths)
        mask = inputs["attention_mask"]
        for token in range(12):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            ids, positions = torch.full((len(mask), 1), 5 + token), mask.sum(1, keepdim=True) - 1
            model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        held = cache.select([0]).compressed_layers
        assert all(sum(int(part.encoded.offsets[-1]) for part in layer.parts) == 2 * 8 for layer in held)


def test_one_grade_is_an_encoder_like_any_other():
    pipeline = kvframe.load("identity", {**SMALL, "allocator": "graded", "budget.ratio": 3})
    _, _, cache = prompted(pipeline)
    cache.compress()
    assert cache.report().entry_ratio == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"budget": {"ratio": 8}}, "budget is not one of bytes"),
        ({"allocator": "top_k", "encoder.joint_heads": 1}, "does not choose among them"),
        ({"encoder.search": [2, 3]}, "give one of them"),
        ({"allocator": {"name": "graded", "heads": "each"}}, "joint_heads"),
        ({"encoder.offers": [1, 99]}, "99"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, says):
    with pytest.raises(SpecError, match=says):
        kvframe.load("identity", {**GRADED, **overrides})


def test_grades_must_rise_in_price():
    class Falling(TwoGrades):
        def grades(self):
            return (Dense(), Coarse())

    spec = fixed().spec.model_copy(update={"encoder": Falling()})
    _, _, cache = prompted(Pipeline(spec))
    with pytest.raises(StageError, match="cheapest on"):
        cache.compress()


@pytest.mark.parametrize(
    ("bits", "error", "says"),
    [
        ((float("nan"), 100.0), 0.1, "cheapest on"),
        ((0.0, 100.0), 0.1, "cheapest on"),
        ((50.0, float("inf")), 0.1, "cheapest on"),
        ((50.0, 100.0), float("nan"), "error in layer 0 is nan"),
        ((50.0, 100.0), -0.5, "error in layer 0 is -0.5"),
        ((50.0, 100.0), 1.5, "error in layer 0 is 1.5"),
        ((50.0, 100.0), None, "'two' fails with TypeError"),
    ],
)
def test_what_an_encoder_says_of_its_grades_is_checked(bits, error, says):
    class Said(TwoGrades):
        declared: float = 100.0

        def grades(self):
            return [self.model_copy(update={"declared": each}) for each in bits]

        def bits_per_entry(self, model, itemsize):
            return self.declared

        def error(self, state):
            return error

    pipeline, seen = Pipeline(fixed().spec.model_copy(update={"encoder": Said()})), observation([9])
    with pytest.raises(StageError, match=says):
        pipeline.run(seen, torch.tensor([20]))


@pytest.mark.parametrize("offers", [None, [], [Dense(), 8], 3])
def test_what_an_encoder_offers_must_be_encoders(offers):
    class Offering(TwoGrades):
        def grades(self):
            return offers

    with pytest.raises(StageError, match="'two' must offer a list of encoders"):
        PipelineSpec.model_validate({**dict(fixed().spec), "encoder": Offering()})


def test_what_a_plan_costs():
    plan = LayerPlan.graded(torch.tensor([[[0, 0, 1, -1], [1, 1, 1, 0]]]))
    error = torch.zeros(1, 2)
    assert float(Grades((0.25, 1.0), error).cost(plan)[0]) == 3 * 0.25 + 4
    # In blocks of four each of the four parts takes one.
    assert float(Grades((0.25, 1.0), error, block=4).cost(plan)[0]) == 2 * 4 * 0.25 + 2 * 4
