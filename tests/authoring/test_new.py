"""Packages that `kvframe new` writes: of every kind, installed, found, and with tests that pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import install, python

from kvframe.authoring.new import check_name, names, write_package
from kvframe.errors import InputError
from kvframe.stages import KINDS

FIELDS = [kind.kind for kind in KINDS]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """One package of each kind, all installed into one folder."""
    folder = tmp_path_factory.mktemp("new")
    written = {kind: write_package(f"my-{kind}", kind, folder) for kind in FIELDS}
    for package in written.values():
        install(package.folder, folder / "target")
    return written, folder / "target"


@pytest.mark.parametrize("kind", FIELDS)
def test_files(packages, kind):
    package = packages[0][kind]
    assert {str(file.relative_to(package.folder)) for file in package.files} == {
        "pyproject.toml",
        "README.md",
        f"kvframe_my_{kind}/__init__.py",
        f"kvframe_my_{kind}/{kind}.py",
        f"kvframe_my_{kind}/specs/my-{kind}.yaml",
        "tests/test_conformance.py",
    }
    for file in package.files:
        assert "$" not in file.read_text(encoding="utf-8"), f"{file} has a placeholder that was not filled"


def test_all_tests_pass_at_once(packages, tmp_path):
    """In one process, so that torch is imported once."""
    written, target = packages
    for kind, package in written.items():
        text = (package.folder / "tests" / "test_conformance.py").read_text(encoding="utf-8")
        (tmp_path / f"test_{kind}.py").write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path, KVFRAME_PROFILE="dev")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 5 stages" in done.stdout
    assert "5 specs" in done.stdout


def test_nothing_is_overwritten(packages):
    package = packages[0]["scorer"]
    before = {file: file.read_text() for file in package.files}
    with pytest.raises(InputError, match="kvframe-my-scorer is there already and is left as it is"):
        write_package("my-scorer", "encoder", package.folder.parent)
    assert {file: file.read_text() for file in package.files} == before


@pytest.mark.parametrize("name", ["a", "my-method", "h3o", "x1-y2"])
def test_names_that_can_be_used(name):
    check_name(name)
    assert names(name, "scorer")["package"].isidentifier()
    assert names(name, "scorer")["class_name"].isidentifier()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My_Method", "but got 'My_Method'; try 'my-method'"),
        ("2fast", "try 'fast'"),
        ("", "try 'my-method'"),
        ("a--b", "try 'a-b'"),
        ("../../etc", "try 'etc'"),
        ("-x", "try 'x'"),
        ("é", "try 'my-method'"),
        ("x" * 41, f"try '{'x' * 40}'"),
        ("kvframe-mine", "leave it off: 'mine'"),
        ("core", "belongs to kvframe itself"),
        ("none", "class None, which means something else"),
        ("literal", "try 'literal-method'"),
        ("snapkv", "spec or plugin 'snapkv' is installed"),
        ("baselines", "spec or plugin 'baselines' is installed"),
    ],
)
def test_names_that_cannot(name, message, tmp_path):
    with pytest.raises(InputError, match=message):
        write_package(name, "scorer", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written: .*choose another --dir"):
        write_package("mine", "scorer", tmp_path / "file")
    with pytest.raises(InputError, match="no stage kind 'scorr'; did you mean 'scorer'"):
        write_package("mine", "scorr", tmp_path)


def test_the_templates_are_packaged():
    root = Path(__file__).parents[2] / "kvframe" / "authoring" / "templates"
    assert len(list(root.glob("*.template"))) == 4 + 2 * len(FIELDS)
