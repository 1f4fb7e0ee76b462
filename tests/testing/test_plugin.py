"""What an author of a plugin sees: tests made of laws, in a pytest of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvframe.errors import InputError
from kvframe.testing import parametrize_with_checks
from kvframe.testing.broken.scorers import Negative

FILE = """
from kvframe.builtin.scorers import Uniform
from kvframe.testing import parametrize_with_checks
from kvframe.testing.broken.scorers import Negative

@parametrize_with_checks([Uniform()])
def test_sound(stage, check):
    check(stage)

@parametrize_with_checks([Negative()], expected_failures={"scores_are_finite_and_not_negative": "it is what it is"})
def test_expected(stage, check):
    check(stage)

@parametrize_with_checks([Uniform()], expected_failures={"is_pure": "it is pure after all"})
def test_unexpected(stage, check):
    check(stage)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "test_mine.py").write_text(FILE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--strict-markers",
        "--kvframe-profile=dev",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout


def test_expected_failures_are_strict(output):
    assert "FAILED test_mine.py::test_unexpected[uniform-is_pure]" in output
    assert "it is pure after all" in output
    assert "1 failed, 31 passed, 1 xfailed" in output


def test_the_run_counts_laws_and_stages(output):
    assert "11 laws on 2 stages (2 with their parameter choices) and 0 specs:" in output


def test_the_plugin_is_light():
    code = "import sys, kvframe.testing.plugin; print([m for m in ('torch', 'hypothesis') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_an_expected_failure_must_name_a_law():
    with pytest.raises(InputError, match=r"'is_pur', which is not one of these; did you mean 'is_pure'\?"):
        parametrize_with_checks([Negative()], expected_failures={"is_pur": "typo"})


@pytest.mark.parametrize(
    ("subjects", "message"),
    [
        ([Negative], r"What is checked must be a stage made of its class, such as MyScorer\(\), .*, but is <class"),
        (Negative(), r"What is checked must be a stage made of its class, .*, but is \('name', 'broken.negative'\)"),
        (["snapkv"], "but is 'snapkv'"),
    ],
)
def test_what_cannot_be_checked_is_named(subjects, message):
    with pytest.raises(InputError, match=message):
        parametrize_with_checks(subjects)
