"""Stages that misbehave while a pipeline runs are named, with what was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import observation

from kvframe.builtin.allocators import TopK
from kvframe.builtin.encoders import Dense, Int8
from kvframe.builtin.kernels import Auto
from kvframe.builtin.scorers import Uniform
from kvframe.builtin.segmenters import Whole
from kvframe.errors import InputError, StageError
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget, PipelineSpec
from kvframe.types import LayerPlan, Plan, Segments

SOUND = {
    "segmenter": Whole(),
    "scorer": Uniform(),
    "allocator": TopK(),
    "encoder": Dense(),
    "attention": Auto(),
    "budget": Budget(ratio=2),
}


def run(lengths=(9, 5), **stages):
    seen = observation(list(lengths))
    return Pipeline(PipelineSpec(**{**SOUND, **stages})).run(seen, torch.tensor([16, 8]))


def stage(base, method, behaviour):
    """A stage of the base's class whose method is `behaviour`, called with the base's own method first."""
    sound = getattr(base, method)

    def misbehave(self, *given):
        return behaviour(lambda: sound(self, *given), *given)

    return type("Odd", (base,), {"__annotations__": {}, method: misbehave})()


def test_sound_stages_run():
    assert run().parts[0][0].encoded.bounds == (0, 4, 8, 10, 12)


SEGMENTERS = {
    r"'whole': Segments.ids must have shape \[2, 9\], but has \[2, 8\]": lambda go, seen: Segments(go().ids[:, 1:]),
    r"'whole' must return Segments, but returned None; is a return missing": lambda go, seen: None,
    r"segmenter 'whole' changes valid in place": lambda go, seen: (seen.valid.fill_(True), go())[1],
}


@pytest.mark.parametrize("message", SEGMENTERS)
def test_segmenters(message):
    with pytest.raises(StageError, match=message):
        run(segmenter=stage(Whole, "segment", SEGMENTERS[message]))


SCORERS = {
    r"'uniform'.scores must have shape \[2, 2, 2, 9\], but has \[2, 2, 9\]": lambda go, *_: go()[0],
    r"'uniform' must return finite fp32 scores >= 0, but returned torch.float64": lambda go, *_: go().double(),
    r"finite fp32 scores >= 0, but returned torch.float32 between -1 and 0": lambda go, *_: -go(),
    r"finite fp32 scores >= 0, .* between nan and nan": lambda go, *_: go() * torch.nan,
    r"scorer 'uniform' returned scores on meta, but the observation is on cpu": lambda go, *_: go().to("meta"),
    r"scorer 'uniform' changes layers\[1\].keys in place, .*; work on a copy": lambda go, seen, _: (
        seen.layers[1].keys.mul_(2),
        go(),
    )[1],
}


@pytest.mark.parametrize("message", SCORERS)
def test_scorers(message):
    with pytest.raises(StageError, match=message):
        run(scorer=stage(Uniform, "score", SCORERS[message]))


def changed(**fields):
    """An allocator's behaviour: its own plan with other fields, each made of the plan's."""
    return lambda go, *_: Plan(tuple(replace(p, **{n: make(p) for n, make in fields.items()}) for p in go().layers))


def full(p, value):
    return torch.full(p.assignment.shape, value)


ALLOCATORS = {
    r"'top_k' planned 1 layers, but 2 are compressed": lambda go, *_: Plan(go().layers[:1]),
    r"\[0\].assignment must hold whole numbers, but is torch.float32": changed(
        assignment=lambda p: p.assignment.float()
    ),
    r"\[0\].assignment must have shape \[2, 2, 9\]": changed(assignment=lambda p: p.assignment[:, :1]),
    r"\[0\].assignment holds 100, but there are 9 tokens": changed(assignment=lambda p: p.assignment.clamp_min(100)),
    r"\[0\].n_entries must have shape \[2, 2\]": changed(n_entries=lambda p: p.n_entries[:1]),
    r"\[0\].n_entries is on meta, but": changed(n_entries=lambda p: p.n_entries.to("meta")),
    r"\[0\].key_weight must have shape": changed(key_weight=lambda p: torch.ones(3)),
    r"\[0\].value_weight must be finite": changed(value_weight=lambda p: full(p, torch.nan)),
    r"\[0\].multiplicity must have shape \[12\], but has \[2\]": changed(multiplicity=lambda p: torch.ones(2)),
    r"\[0\].multiplicity must be at least 1, but is 0.5": changed(multiplicity=lambda p: torch.full((12,), 0.5)),
    r"\[0\].multiplicity must be at least 1, but is nan": changed(multiplicity=lambda p: torch.full((12,), torch.nan)),
    r"\[0\].positions must have shape \[12\]": changed(positions=lambda p: torch.ones(3, dtype=torch.int32)),
    r"'top_k' made 36 entries for row 0, but the budget is 16": lambda go, seen, *_: Plan(
        (LayerPlan.keep(seen.body[:, None].expand(2, 2, 9)),) * 2
    ),
    r"allocator 'top_k' changes scores in place": lambda go, seen, ids, scores, _: (scores.zero_(), go())[1],
    r"allocator 'top_k' changes budget in place": lambda go, seen, ids, scores, budget: (budget.add_(9), go())[1],
}


@pytest.mark.parametrize("message", ALLOCATORS)
def test_allocators(message):
    with pytest.raises(StageError, match=message):
        run(allocator=stage(TopK, "allocate", ALLOCATORS[message]))


def recoded(**fields):
    return lambda go, entries, _: replace(go(), **{n: make(entries) for n, make in fields.items()})


ENCODERS = {
    r"'int8' must keep the number of rows of each head \(\[4, 4, 2, 2\]\), but .* say \[4, 4, 2, 1\]": recoded(
        offsets=lambda e: e.offsets.clamp_max(11)
    ),
    r"'int8' must decode to torch.float32, but its codes say torch.bfloat16": recoded(dtype=lambda e: torch.bfloat16),
    r"'int8' must carry log_multiplicity as it came, but made it up": recoded(
        log_multiplicity=lambda e: torch.zeros(12)
    ),
    r"'int8': code 'k' is on meta": recoded(codes=lambda e: {"k": e.keys.to("meta")}),
    r"'int8': code 'k' holds infinities or NaN; .* rounding to torch.float16": recoded(
        codes=lambda e: {"k": (e.keys.abs() + 1e6).half()}
    ),
    r"'int8' must return Encoded, but returned Entries": lambda go, entries, _: entries,
}


@pytest.mark.parametrize("message", ENCODERS)
def test_encoders(message):
    with pytest.raises(StageError, match=message):
        run(encoder=stage(Int8, "encode", ENCODERS[message]))


def test_encoders_that_learn():
    with pytest.raises(StageError, match=r"'int8' must learn one state a layer, 2 in all, but fit returned 1"):
        run(encoder=stage(Int8, "fit", lambda go, *_: [()]))
    with pytest.raises(StageError, match=r"encoder 'int8' changes layers\[0\].values in place"):
        run(encoder=stage(Int8, "fit", lambda go, seen, _: (seen.layers[0].values.zero_(), go())[1]))


FAILING = {
    "segmenter": (Whole, "segment"),
    "scorer": (Uniform, "score"),
    "allocator": (TopK, "allocate"),
    "encoder": (Dense, "encode"),
}


@pytest.mark.parametrize(("kind", "base", "method"), [(kind, *FAILING[kind]) for kind in FAILING])
def test_what_a_stage_raises_names_it(kind, base, method):
    with pytest.raises(
        StageError, match=rf"^{kind} '\w+' fails with ZeroDivisionError: division by zero; mend it,"
    ) as error:
        run(**{kind: stage(base, method, lambda *_: 1 / 0)})
    assert isinstance(error.value.__cause__, ZeroDivisionError), "the traceback is still there"
    assert error.value.__cause__.__traceback__.tb_next is not None


def test_a_method_with_other_arguments_names_its_stage():
    odd = type("Odd", (Dense,), {"__annotations__": {}, "fit": lambda self, observation: [(), ()]})()
    with pytest.raises(StageError, match=r"encoder 'dense' fails with TypeError: .*argument"):
        run(encoder=odd)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, InputError])
def test_what_is_no_fault_of_a_stage_passes(error):
    def behaviour(*_):
        raise error("of its own")

    with pytest.raises(error, match=r"^of its own$"):
        run(scorer=stage(Uniform, "score", behaviour))


def test_inference_mode_is_served():
    with torch.inference_mode():
        assert run().parts[0][0].encoded.bounds[-1] == 12
