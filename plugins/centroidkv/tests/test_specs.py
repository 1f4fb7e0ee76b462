"""The plugin as users meet it: found through its entry point, documented, with two specs."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import kvframe
import kvframe_centroidkv
from kvframe.registry import build
from kvframe.spec import validate_spec


def test_registers_its_stage_and_specs():
    found = build([EntryPoint("centroidkv", "kvframe_centroidkv", "kvframe")])
    assert {name for name, owner in found.owners.items() if owner.name == "centroidkv"} == {
        "allocator:centroidkv.soft_matching",
        "spec:centroidkv",
        "spec:centroidkv-paper",
    }


@pytest.mark.parametrize("name", ["centroidkv", "centroidkv-paper"])
def test_spec_loads_and_round_trips(name):
    spec = kvframe.load(name).spec
    assert spec.allocator.name == "centroidkv.soft_matching"
    assert spec.budget.ratio == 4
    assert spec.description.endswith(".")
    assert validate_spec(spec.dump()) == spec


def test_specs_hold_the_two_readings():
    ours, literal = kvframe.load("centroidkv").spec, kvframe.load("centroidkv-paper").spec
    assert (ours.allocator.rope, ours.allocator.share, ours.allocator.max_share) == ("pre", "global", 0.5)
    assert (literal.allocator.rope, literal.allocator.share, literal.allocator.max_share) == ("post", "head", 1.0)
    assert (ours.segmenter.size, literal.segmenter.size) == (256, 64)
    assert literal.allocator.safeguard == 0


@pytest.mark.parametrize("stage", kvframe_centroidkv.kvframe_register_stages(), ids=lambda stage: stage.__name__)
def test_stages_are_documented(stage):
    assert stage.paper
    assert stage.__doc__
    for name, field in stage.model_fields.items():
        assert name == "name" or field.description
