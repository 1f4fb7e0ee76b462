"""A distribution of somebody else: installed by pip, found through its entry point, used beside core's stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from installed import install, python

SOURCE = Path(__file__).parents[1] / "thirdparty" / "kvframe-lastwords"
MIXED = """version: 1
budget: {ratio: 4}
protect: {sink: 2, recent: 4}
segmenter: {name: chunks, size: 8}
scorer: {name: lastwords.closing, half_life: 4}
allocator: top_k
encoder: int8
attention: reference
"""
USE = """
import json, sys
import torch
from tiny import batch, greedy, tiny_model
import kvframe
from pathlib import Path
from kvframe.registry import registry

model = tiny_model("llama")
cache = kvframe.load(Path("mixed.yaml")).cache(model)
with torch.no_grad():
    tokens = greedy(model, batch([61, 40]), cache, new=3)
report = cache.report()
owner = registry().owners["scorer:lastwords.closing"]
print(json.dumps([list(tokens.shape), report.entry_ratio, owner.distribution, owner.version, kvframe.__file__]))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder into which the distribution is installed. It is built from a copy: a build leaves nothing behind."""
    folder = tmp_path_factory.mktemp("thirdparty")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    install(folder / "source", folder / "target")
    return folder / "target"


def test_it_compresses_beside_stages_of_core(target, tmp_path):
    (tmp_path / "mixed.yaml").write_text(MIXED)
    tests = Path(__file__).parents[1]
    done = python(target, "-c", f"import sys; sys.path.insert(0, {str(tests)!r})\n{USE}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shape, ratio, distribution, version, _ = json.loads(done.stdout)
    assert (shape, distribution, version) == ([2, 3], "kvframe-lastwords", "0.1.0")
    assert ratio >= 4


def test_its_own_conformance_test_passes(target, tmp_path):
    shutil.copytree(SOURCE / "tests", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path, KVFRAME_PROFILE="dev")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "laws on 1 stage" in done.stdout


def test_it_is_listed_and_can_be_switched_off(target, tmp_path):
    listed = python(target, "-c", "from kvframe.cli import main; main()", "list", "--plugins", cwd=tmp_path)
    assert "kvframe-lastwords" in listed.stdout
    assert "lastwords.closing" in listed.stdout
    validate = ("-c", "from kvframe.cli import main; main()", "validate", "lastwords")
    assert python(target, *validate, cwd=tmp_path).returncode == 0
    off = python(target, *validate, cwd=tmp_path, KVFRAME_DISABLE_PLUGINS="lastwords")
    assert off.returncode == 2
    assert "There is no spec named 'lastwords'" in off.stderr
    assert "Traceback" not in off.stderr
