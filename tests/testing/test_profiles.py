"""No test depends on how long something takes, whichever profile of hypothesis it runs under."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")])


def test_the_current_profile_has_no_deadline():
    assert settings().deadline is None
    assert tuple(settings().suppress_health_check) == (HealthCheck.too_slow,)


@pytest.mark.parametrize("name", ["default", "ci"])
@pytest.mark.parametrize("folder", ["tests", "plugins/aatc/tests"])
def test_nor_has_any_other(name, folder, tmp_path):
    """Asked for on the command line, for core's tests and for a plugin's alone."""
    line = f"{ROOT / folder}/conftest.py"
    check = "from hypothesis import settings; assert settings().deadline is None; print(settings().derandomize)"
    code = f"import pytest\nclass Says:\n    def pytest_collection_finish(self):\n        {check}\n"
    code += f"raise SystemExit(pytest.main(['-q', '--co', '--hypothesis-profile', {name!r}, {line!r}], [Says()]))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert str(name == "ci") in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_test_sets_a_deadline_or_silences_a_check(path):
    """A law within a test draws within what was drawn, which is not to be helped."""
    given = [(node.arg, node.value) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)]
    assert {ast.unparse(value) for name, value in given if name == "deadline"} <= {"None"}
    silenced = [ast.unparse(value)[1:-1].split(", ") for name, value in given if name == "suppress_health_check"]
    assert {check for checks in silenced for check in checks} <= {"HealthCheck.too_slow", "HealthCheck.nested_given"}
