"""Every stage and every named spec that is registered, core's and the plugins', obeys the laws."""

from __future__ import annotations

import os

import kvframe
from kvframe.registry import registry
from kvframe.testing import parametrize_with_checks, variants
from kvframe.testing.law import PROFILE

FAMILIES = [variants(stage) for classes in registry().stages.values() for stage in classes.values()]
# Plugins that bring specs only: they combine what others bring, each of which is checked by itself.
COMBINING = {plugin.name for plugin in registry().plugins} - {
    owner.name for name, owner in registry().owners.items() if not name.startswith("spec:")
}
PIPELINES = {name: kvframe.load(name) for name in sorted(registry().specs)}
COMBINED = [pipeline for name, pipeline in PIPELINES.items() if registry().owners[f"spec:{name}"].name in COMBINING]
# A choice of one parameter, or a combination, is checked on fewer cases than the defaults, unless many were asked for.
SHARE = 1.0 if os.environ.get(PROFILE) == "deep" else 0.3


@parametrize_with_checks([family[0] for family in FAMILIES])
def test_stage(stage, check):
    check(stage)


@parametrize_with_checks([stage for family in FAMILIES for stage in family[1:]])
def test_choice(stage, check):
    check(stage, share=SHARE)


@parametrize_with_checks([pipeline for pipeline in PIPELINES.values() if pipeline not in COMBINED])
def test_spec(stage, check):
    check(stage)


@parametrize_with_checks(COMBINED)
def test_combined_spec(stage, check):
    check(stage, share=SHARE)
