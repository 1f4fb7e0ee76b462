"""Stages of different plugins in one spec, in combinations that nobody thought of, obey the laws of specs too."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from kvframe.pipeline import Pipeline
from kvframe.testing import specs
from kvframe.testing.checks.pipeline import (
    budget_is_respected,
    bytes_are_as_reported,
    decoding_steps_equal_one_block,
    full_budget_is_full_attention,
    padding_changes_nothing,
    survives_a_file,
)

LAWS = (
    survives_a_file,
    full_budget_is_full_attention,
    padding_changes_nothing,
    bytes_are_as_reported,
    decoding_steps_equal_one_block,
)


# A law draws cases of its own, for each spec drawn.
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given])
@given(specs())
def test_any_valid_combination(spec):
    pipeline = Pipeline(spec, "drawn")
    for law in (*LAWS, *([] if spec.allocator.keeps_all else [budget_is_respected])):
        law(pipeline, profile="dev")
