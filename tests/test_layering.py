"""What may import what, and what importing kvframe does."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvframe

ROOT = Path(kvframe.__file__).parent
PLUGINS = sorted(path for path in (ROOT.parent / "plugins").glob("*/kvframe_*") if path.is_dir())
PUBLIC = {
    "kvframe",
    "kvframe.bias",
    "kvframe.calibration",
    "kvframe.errors",
    "kvframe.hookspecs",
    "kvframe.ops",
    "kvframe.registry",
    "kvframe.rope",
    "kvframe.stages",
    "kvframe.types",
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_core_knows_no_plugin():
    for file in ROOT.rglob("*.py"):
        assert not {name for name in imports(file) if name.startswith("kvframe_")}, file


def test_only_the_transformers_layer_imports_transformers():
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0] in ("hf", "eval"):
            continue
        for node in ast.parse(file.read_text()).body:
            names = (
                {a.name for a in node.names} if isinstance(node, ast.Import) else {getattr(node, "module", None) or ""}
            )
            assert not {name for name in names if name.split(".")[0] == "transformers"}, file


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_plugins_use_public_names_and_not_each_other(package):
    for file in package.rglob("*.py"):
        for name in imports(file):
            top = name.split(".")[0]
            assert not top.startswith("kvframe_") or top == package.name, f"{file} imports {name}"
            assert top != "kvframe" or name in PUBLIC, f"{file} imports {name}, which is not public"


def run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_kvframe_is_light_and_changes_nothing():
    assert (
        run("import sys, kvframe; print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])")
        == "[]"
    )
    code = """
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
def state():
    return (sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping),
            sorted(DYNAMIC_LAYER_TYPE_MAPPING))
before = state()
import kvframe, kvframe.hf, kvframe.eval
kvframe.load("identity")
print(before == state())
"""
    assert run(code) == "True"


def test_core_works_without_plugins():
    code = "import kvframe.registry as r; import kvframe; print(len(r.registry().plugins), kvframe.load('int8').name)"
    names = ",".join(point.name for point in entry_points(group="kvframe"))
    assert run(code, KVFRAME_DISABLE_PLUGINS=names) == "1 int8"


@pytest.mark.parametrize("module", ["kvframe", "kvframe.ops", "kvframe.hf", "kvframe.eval", "kvframe.testing"])
def test_the_public_names_exist(module):
    import importlib

    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
