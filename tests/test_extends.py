"""Specs that extend others."""

from __future__ import annotations

import pytest

from kvframe.errors import SpecError
from kvframe.spec import read_spec, validate_spec
from kvframe.specfile import read_spec_data


@pytest.fixture
def write(tmp_path):
    def written(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{name}.yaml"

    return written


def test_a_named_spec_is_extended(write):
    spec = read_spec(write(mine="extends: snapkv\nscorer: {window: 9}\nprotect: {recent: 8}\nencoder: int8\n"))
    base = read_spec("snapkv")
    assert (spec.scorer.name, spec.scorer.window, spec.scorer.pool) == (base.scorer.name, 9, base.scorer.pool)
    assert (spec.protect.sink, spec.protect.recent) == (base.protect.sink, 8)
    assert (spec.encoder.name, spec.budget) == ("int8", base.budget)


def test_how_it_was_written_does_not_matter(write):
    """Extending, writing out and overriding give the same pipeline."""
    extended = read_spec(write(mine="extends: snapkv\nscorer: {name: baselines.snapkv, window: 9}\n"))
    overridden = read_spec("snapkv", {"scorer.window": 9})
    written_out = validate_spec(extended.dump())
    assert extended.fingerprint == overridden.fingerprint == written_out.fingerprint


@pytest.mark.parametrize("base", ["scorer: {name: baselines.snapkv, window: 9}", "scorer: baselines.snapkv"])
@pytest.mark.parametrize("other", ["scorer: baselines.h2o", "scorer: {name: baselines.h2o, normalise: sum}"])
def test_another_stage_replaces_the_one_of_the_base(write, base, other):
    spec = read_spec(write(base=base, mine=f"extends: base.yaml\n{other}\n"))
    assert spec.scorer.name == "baselines.h2o"
    assert not hasattr(spec.scorer, "window")


@pytest.mark.parametrize("again", ["scorer: baselines.snapkv", "scorer: {name: baselines.snapkv}", "scorer: {}"])
def test_the_same_stage_is_merged(write, again):
    file = write(base="scorer: {name: baselines.snapkv, window: 9}", mine=f"extends: base.yaml\n{again}\n")
    assert read_spec(file).scorer.window == 9


def test_budgets_are_alternatives(write):
    spec = read_spec(write(base="budget: {ratio: 3}", mine="extends: base.yaml\nbudget: {entries: 50}\n"))
    assert (spec.budget.ratio, spec.budget.entries) == (None, 50)


def test_a_description_is_not_handed_down(write):
    file = write(mine="extends: snapkv\n")
    assert read_spec(file).description == ""
    assert read_spec(file).fingerprint == read_spec("snapkv").fingerprint


def test_a_path_counts_from_the_file_in_which_it_stands(tmp_path, write):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "one.yaml").write_text("extends: ../two.yaml\nprotect: {sink: 1}\n")
    spec = read_spec(write(two="protect: {sink: 2, recent: 3}", mine="extends: bases/one.yaml\nencoder: int8\n"))
    assert (spec.protect.sink, spec.protect.recent, spec.encoder.name) == (1, 3, "int8")


def test_a_file_may_have_the_name_of_the_spec_that_it_extends(write):
    assert read_spec(write(snapkv="extends: snapkv\n")).scorer == read_spec("snapkv").scorer


def test_overrides_come_last(write):
    file = write(mine="extends: snapkv\nscorer: {window: 9}\n")
    assert read_spec(file, {"scorer.window": 10}).scorer.window == 10


@pytest.mark.parametrize(
    ("base", "mine", "message"),
    [
        ("scorer: {name: baselines.snapkv, windw: 1}", "encoder: int8", r"base.yaml:1: scorer.windw: unknown key"),
        (
            "version: 1\nscorer: snapvk",
            "scorer: {window: 1}",
            r"base.yaml:2: scorer: there is no scorer named 'snapvk'",
        ),
        ("scorer:\n  name: snapvk", "scorer: {window: 1}", r"base.yaml:2: scorer: there is no scorer named 'snapvk'"),
        ("scorer: baselines.snapkv", "scorer: {windw: 1}", r"mine.yaml:2: scorer.windw: unknown key 'windw' of"),
        (
            "scorer: {name: baselines.snapkv, window: 9}",
            "scorer: {window: 0}",
            r"mine.yaml:2: scorer.window: .* it is 0",
        ),
        (
            "scorer: {name: baselines.snapkv, window: 0}",
            "scorer: {pool: max}",
            r"base.yaml:1: scorer.window: .* it is 0",
        ),
        ("protect: {sinks: 1}", "protect: {sink: 1}", r"base.yaml:1: protect.sinks: unknown key"),
        ("budget: [", "encoder: int8", r"base.yaml:\d: not valid YAML"),
    ],
)
def test_errors_point_to_the_file_in_which_the_key_stands(write, base, mine, message):
    with pytest.raises(SpecError, match=message):
        read_spec(write(base=base, mine=f"extends: base.yaml\n{mine}\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("extends: snapvk", r"mine.yaml:2: extends: there is no spec named 'snapvk'; did you mean 'snapkv'"),
        ("extends: none.yaml", r"mine.yaml:2: extends: there is no file '.*none.yaml'; the path counts from '.*mine"),
        ("extends: [snapkv]", r"mine.yaml:2: extends: give the name of a spec, or a relative path, but it is \['sn"),
        ("extends:", r"mine.yaml:2: extends: give the name of a spec, or a relative path, but it is None"),
        ("extends: mine.yaml", r"mine.yaml:2: extends: a spec cannot extend itself"),
        ("extends: ./x/../mine.yaml", r"mine.yaml:2: extends: .*(cannot extend itself|no file)"),
    ],
)
def test_bases_that_are_not_there(write, line, message):
    with pytest.raises(SpecError, match=message):
        read_spec(write(mine=f"version: 1\n{line}\n"))


def test_a_circle_is_shown(write):
    with pytest.raises(SpecError, match=r"one.yaml:1: extends: .*itself \(\S*two.yaml -> \S*one.yaml -> \S*two.yaml\)"):
        read_spec(write(one="extends: two.yaml", two="extends: one.yaml"))


def test_nothing_is_read_twice_from_one_place(write):
    """What a reader gets back is theirs to change."""
    file = write(mine="extends: snapkv\n")
    read_spec_data(file).data["scorer"]["window"] = 1
    assert read_spec_data(file).data["scorer"]["window"] != 1


def test_data_that_is_no_file_cannot_extend():
    with pytest.raises(SpecError, match="extends: it is read from files only"):
        validate_spec({"extends": "snapkv"})
