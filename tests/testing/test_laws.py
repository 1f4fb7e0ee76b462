"""Every law is broken by the stage that was made for it, and says so in a way that helps."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import core

import kvframe
from kvframe.builtin.scorers import Uniform
from kvframe.errors import InputError, KvframeError
from kvframe.pipeline import Pipeline
from kvframe.testing import ConformanceError, Geometry, Prompts, check_spec, check_stage, laws_of
from kvframe.testing.broken import PIPELINES, STAGES
from kvframe.testing.broken.encoders import FirstScale
from kvframe.testing.broken.scorers import Negative, Remembers, TakesNan
from kvframe.testing.case import cases_for
from kvframe.testing.checks import LAWS
from kvframe.testing.law import Law, profile_settings
from kvframe.testing.models import tiny_model


@pytest.fixture(autouse=True)
def _as_new(monkeypatch):
    """Some of the broken stages remember things or spoil the model: each test starts afresh."""
    # Which laws a stage breaks is a matter of the cases, so they stay the same whatever seed is given.
    monkeypatch.setattr(core, "global_force_seed", None)
    Remembers.memory.clear()
    FirstScale.largest.clear()
    tiny_model.cache_clear()
    yield
    tiny_model.cache_clear()


def broken(results):
    return {result.law for result in results if not result.passed}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.model_fields["name"].default)
def test_a_broken_stage_breaks_its_laws_and_no_others(stage):
    assert broken(check_stage(stage(), profile="ci", shrink=False)) == set(stage.breaks)


# A stage that nobody registered is no member of the spec's unions, of which pydantic warns.
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize(("pipeline", "laws"), PIPELINES, ids=lambda value: getattr(value, "name", ""))
def test_a_broken_spec_breaks_its_laws_and_no_others(pipeline, laws):
    assert broken(check_spec(pipeline, profile="ci", shrink=False)) == set(laws)


def test_every_law_has_something_made_to_break_it():
    made_for = {stage.breaks[0] for stage in STAGES}
    assert made_for == {law.name for kind in LAWS if kind != "pipeline" for law in LAWS[kind]}
    assert {laws[0] for _, laws in PIPELINES} | {"row_alone_equals_row_in_batch"} == {
        law.name for law in LAWS["pipeline"]
    }


def test_names_are_unique_within_a_kind():
    for kind in ("segmenter", "scorer", "allocator", "encoder", "attention"):
        names = [law.name for law in (*LAWS["stage"], *LAWS[kind])]
        assert len(names) == len(set(names))
    assert all(law.text.endswith(".") for laws in LAWS.values() for law in laws)


def test_a_failure_names_stage_law_case_and_what_was_expected():
    with pytest.raises(ConformanceError) as caught:
        LAWS["scorer"][1](Negative())
    first, second, third = str(caught.value).splitlines()
    assert first.startswith(
        "scorer 'broken.negative' breaks the law scores_are_finite_and_not_negative: Scores of body tokens are finite"
    )
    assert second.startswith("  expected finite scores >= 0, got")
    # The smallest case there is: one token, one head, nothing protected.
    assert third == "  smallest case: Case(prompts=Prompts())"
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, KvframeError)


def test_a_failure_can_be_made_again():
    """What a message prints is Python that makes the case."""
    printed = "Prompts(lengths=(1, 3), seed=7, geometry=Geometry(kv_heads=2, head_dim=16), sink=1)"
    case = eval(printed, {"Prompts": Prompts, "Geometry": Geometry})
    assert repr(case) == printed
    assert torch.equal(case.observation().layers[0].keys, eval(printed).observation().layers[0].keys)


def test_parameters_are_named():
    (result,) = [r for r in check_stage(TakesNan(power=2.0)) if not r.passed]
    assert result.subject == "broken.takes_nan(power=2.0)"
    assert "scorer 'broken.takes_nan'(power=2.0)" in result.message


def test_checks_are_the_same_at_every_call():
    once, again = ([(r.law, r.message) for r in check_stage(Negative(), profile="dev", shrink=False)] for _ in range(2))
    assert once == again


def test_a_seed_draws_other_cases(monkeypatch):
    """`--hypothesis-seed`, although the cases are the same at every run without it."""
    drawn = []
    for seed in (None, None, 1, 2):
        monkeypatch.setattr(core, "global_force_seed", seed)
        cases = []
        Law("looks", "scorer", "It looks.", lambda stage, case, to=cases: to.append(repr(case)), cases_for)(Uniform())
        drawn.append(cases)
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in combinations(drawn[1:], 2))


def test_a_stage_that_fails_to_bind_does_not_get_off():
    """It may refuse a model, but not break down over it."""
    fails = type("Fails", (Uniform,), {"__annotations__": {}, "bind": lambda self, model: 1 / 0})
    pipeline = kvframe.load("identity")
    broken_down = Pipeline(pipeline.spec.model_copy(update={"scorer": fails()}))
    results = check_spec(broken_down, profile="dev", shrink=False)
    assert any("scorer 'uniform' fails with ZeroDivisionError" in result.message for result in results)


def test_an_unknown_profile_is_named(monkeypatch):
    monkeypatch.setenv("KVFRAME_PROFILE", "thorough")
    with pytest.raises(InputError, match="no profile 'thorough'; there are: dev, ci, deep"):
        profile_settings()


def test_only_laws_that_apply_are_run():
    from kvframe.builtin.allocators import KeepAll, TopK

    names = [{law.name for law in laws_of(stage)} for stage in (KeepAll(), TopK())]
    assert names[0] - names[1] == {"heads_agree_as_declared", "everything_is_kept_as_declared"}
    assert names[1] - names[0] == {"budget_is_respected"}
