"""Every stage and every named spec that is registered, core's and the plugins', obeys the laws."""

from __future__ import annotations

import kvframe
from kvframe.registry import registry
from kvframe.testing import parametrize_with_checks, variants

STAGES = [stage for classes in registry().stages.values() for name in classes for stage in variants(classes[name])]
PIPELINES = [kvframe.load(name) for name in sorted(registry().specs)]


@parametrize_with_checks(STAGES)
def test_stage(stage, check):
    check(stage)


@parametrize_with_checks(PIPELINES)
def test_spec(stage, check):
    check(stage)
