"""The specs load, hold what they should and serve a model; that they obey the laws is in tests/conformance."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvframe
from kvframe.registry import registry

METHODS = ["forest", "centroidkv", "adakv"]


@pytest.mark.parametrize(("method", "allocator"), [("gracekv", "gracekv.graded_flow"), ("snapkv", "graded")])
def test_scores_share_out_bits(method, allocator):
    hybrid, alone = kvframe.load(f"{method}+aatc").spec, kvframe.load(method).spec
    assert hybrid.scorer == alone.scorer
    assert hybrid.allocator.name == allocator
    assert [grade.key_bits for grade in hybrid.encoder.grades()] == [1, 2, 4]
    assert hybrid.encoder.joins_heads == 0
    assert hybrid.budget.of == "bytes"


@pytest.mark.parametrize("method", METHODS)
def test_a_hybrid_is_its_method_in_other_codes(method):
    hybrid, alone = kvframe.load(f"{method}+aatc").spec, kvframe.load(method).spec
    assert registry().owners[f"spec:{method}+aatc"].name == "hybrids"
    for stage in ("segmenter", "scorer", "allocator", "attention"):
        assert getattr(hybrid, stage) == getattr(alone, stage)
    assert hybrid.encoder.name == "aatc.transform"
    assert hybrid.encoder.joins_heads == 1
    assert hybrid.budget.of == "bytes"
    assert kvframe.load(f"{method}+aatc", {"budget.ratio": 16}).spec.budget.of == "bytes"
    absolute = kvframe.load(f"{method}+aatc", {"budget.bytes": "64MiB"}).spec.budget
    assert (absolute.bytes, absolute.ratio, absolute.of) == (64 << 20, None, "entries")


def test_a_missing_plugin_is_named_and_the_rest_works():
    code = """
import kvframe
from kvframe.errors import SpecError
kvframe.load("snapkv")
try:
    kvframe.load("snapkv+aatc")
except SpecError as error:
    print(error)
"""
    environment = {**os.environ, "KVFRAME_DISABLE_PLUGINS": "aatc"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "there is no encoder named 'aatc.transform'" in done.stdout, done.stdout
