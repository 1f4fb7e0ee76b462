"""The plugin as users meet it: found through its entry point, with one spec for each method."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

import kvframe
import kvframe_baselines
from kvframe.registry import build
from kvframe.spec import validate_spec

SPECS = {
    "streamingllm": ("baselines.streaming", "top_k"),
    "h2o": ("baselines.h2o", "top_k"),
    "snapkv": ("baselines.snapkv", "top_k"),
    "tova": ("baselines.tova", "top_k"),
    "keynorm": ("baselines.key_norm", "top_k"),
    "keydiff": ("baselines.keydiff", "top_k"),
    "expectedattention": ("baselines.expected_attention", "top_k"),
    "pyramidkv": ("baselines.snapkv", "baselines.pyramid"),
    "adakv": ("baselines.snapkv", "baselines.ada"),
    "chunkkv": ("baselines.snapkv", "baselines.chunk"),
    "globalkv": ("baselines.snapkv", "baselines.global_top_k"),
    "d2o": ("baselines.h2o", "baselines.d2o"),
    "cam": ("baselines.h2o", "baselines.cam"),
}
CODES = {"kivi", "int4", "int2", "rotation"}
STAGES = list(kvframe_baselines.kvframe_register_stages())


def test_registers_its_stages_and_specs() -> None:
    found = build([EntryPoint("baselines", "kvframe_baselines", "kvframe")])
    assert {name for name, owner in found.owners.items() if owner.name == "baselines"} == {
        *(f"{stage.kind}:{stage.model_fields['name'].default}" for stage in STAGES),
        *(f"spec:{name}" for name in SPECS.keys() | CODES),
    }


@pytest.mark.parametrize("name", SPECS)
def test_spec_loads_and_round_trips(name: str) -> None:
    spec = kvframe.load(name).spec
    assert (spec.scorer.name, spec.allocator.name) == SPECS[name]
    assert spec.budget.ratio == 4
    assert spec.description.endswith(".")
    assert validate_spec(spec.dump()) == spec


@pytest.mark.parametrize("name", sorted(CODES))
def test_codes_keep_every_token(name: str) -> None:
    spec = kvframe.load(name).spec
    assert spec.allocator.keeps_all
    assert spec.description.endswith(".")
    assert validate_spec(spec.dump()) == spec


@pytest.mark.parametrize("name", SPECS)
def test_spec_plans_within_its_budget(name: str, make_prompts) -> None:
    pipeline = kvframe.load(name)
    observation, _ = make_prompts(2, [65, 33, 7], sink=4, recent=3).left_padded()
    full = observation.shape[0] * observation.shape[2] * observation.body.sum(1)
    for share in (1, 4):
        plan = pipeline.plan(observation, full // share)
        spent = sum(layer.n_entries.sum(1) for layer in plan.layers)
        assert (spent <= full // share).all()
        assert share > 1 or torch.equal(spent, full)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_stages_are_documented(stage) -> None:
    assert "paper" in vars(stage) or stage is kvframe_baselines.GlobalTopK
    assert stage.__doc__
    for name, field in stage.model_fields.items():
        assert name == "name" or field.description
