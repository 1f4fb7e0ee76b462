"""What this plugin registers is held to kvframe's laws."""

import kvframe
from kvframe.registry import registry
from kvframe.testing import parametrize_with_checks, variants
from kvframe_lastwords import Lastwords


@parametrize_with_checks([*variants(Lastwords), kvframe.load("lastwords")])
def test_conformance(stage, check):
    check(stage)


def test_the_plugin_is_found_through_its_entry_point():
    assert registry().owners["scorer:lastwords.closing"].distribution == "kvframe-lastwords"
