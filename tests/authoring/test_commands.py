"""The commands for authors, as they are typed."""

from __future__ import annotations

import json
from typing import ClassVar, Literal

import pytest
import torch
import yaml
from typer.testing import CliRunner

from kvframe.authoring import check as check_module
from kvframe.authoring.check import subjects
from kvframe.cli import app
from kvframe.errors import InputError
from kvframe.pipeline import Pipeline
from kvframe.stages import Scorer


@pytest.fixture
def kvframe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


def test_validate_prints_a_spec_that_reads_back(kvframe, tmp_path):
    done = kvframe("validate", "snapkv", "--set", "budget.ratio=16", "--set", "scorer.window=9")
    assert done.exit_code == 0, done.output
    assert "Dry run: " in done.stderr
    data = yaml.safe_load(done.stdout)
    assert (data["budget"]["ratio"], data["scorer"]["window"]) == (16, 9)
    (tmp_path / "again.yaml").write_text(done.stdout)
    again = kvframe("validate", tmp_path / "again.yaml", "--no-dry-run")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert again.stderr == ""


@pytest.mark.parametrize("command", ["validate", "explain", "check"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "scorer.windw=3",
            "error: override: scorer.windw: unknown key 'windw' of 'baselines.snapkv'; did you mean 'window'",
        ),
        ("budgt.ratio=3", "error: override: budgt: unknown key 'budgt'; did you mean 'budget'"),
        ("budget.ratio", "error: --set takes KEY=VALUE"),
        ("budget.ratio=[", "error: --set budget.ratio=[: not valid YAML: "),
        ("budget.ratio=" + "[" * 5000, "...: more than 32 levels deep"),
        ("a." * 5000 + "a=1", "more than 32 levels deep"),
        ("scorer=!!python/object:x {}", "error: --set scorer=!!python/object:x {}: tags such as"),
        ("extends=h2o", "error: extends cannot be overridden"),
    ],
)
def test_wrong_settings(kvframe, command, setting, message):
    done = kvframe(command, "snapkv", "--set", setting)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_values_have_the_types_of_yaml(kvframe):
    settings = ["encoder=int8", "decode.flush=null", "scorer={name: baselines.snapkv, pool: max}", "protect.sink=2"]
    done = kvframe("validate", "snapkv", "--no-dry-run", *[word for setting in settings for word in ("--set", setting)])
    data = yaml.safe_load(done.stdout)
    assert (data["encoder"]["name"], data["decode"]["flush"], data["protect"]["sink"]) == ("int8", None, 2)
    assert data["scorer"]["pool"] == "max"


def test_explain(kvframe, tmp_path):
    from tiny import tiny_model

    tiny_model("llama").config.save_pretrained(tmp_path)
    done = kvframe("explain", "gracekv", "--model", tmp_path, "--tokens", 2000, "--set", "budget.ratio=16")
    assert done.exit_code == 0, done.output
    assert "Ratio 16." in done.stdout
    assert "gracekv.value_flow" in done.stdout
    assert "With --model, entries and bytes are estimated" in kvframe("explain", "gracekv").stderr
    wrong = kvframe("explain", "gracekv", "--model", tmp_path / "none.gguf")
    assert (wrong.exit_code, "There is no model at" in wrong.stderr) == (2, True)


def test_schema(kvframe):
    done = kvframe("schema")
    assert json.loads(done.stdout)["title"] == "kvframe pipeline spec"


def test_list_plugins(kvframe, monkeypatch):
    done = kvframe("list", "--plugins")
    assert done.exit_code == 0
    for text in ("baselines", "baselines.snapkv", "Li et al., 2024", "distribution", "built in"):
        assert text in done.stdout


def test_new(kvframe, tmp_path):
    done = kvframe("new", "mine", "--kind", "encoder", "--dir", tmp_path)
    assert done.exit_code == 0
    assert (tmp_path / "kvframe-mine" / "kvframe_mine" / "encoder.py").is_file()
    assert "pytest" in done.stderr
    again = kvframe("new", "mine", "--kind", "encoder", "--dir", tmp_path)
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)
    assert kvframe("new", "mine", "--kind", "scorr", "--dir", tmp_path).exit_code == 2


def test_check_a_stage(kvframe):
    done = kvframe("check", "baselines.key_norm", "--profile", "dev")
    assert done.exit_code == 0, done.output
    assert "✓" in done.stdout
    assert "checks passed" in done.stdout


class Negative(Scorer):
    """Scores below zero."""

    paper: ClassVar[str] = ""
    name: Literal["probe.negative"] = "probe.negative"

    def score(self, observation, segments):
        return -torch.ones(observation.shape)


def test_a_broken_stage_is_status_1(kvframe, monkeypatch):
    monkeypatch.setattr(check_module, "subjects", lambda target, overrides: [Negative()])
    done = kvframe("check", "probe.negative", "--profile", "dev")
    assert done.exit_code == 1
    assert "✗" in done.stdout
    assert "probe.negative' breaks the law" in done.stdout
    assert "checks failed" in done.stdout


def test_what_a_target_stands_for(tmp_path):
    def found(target):
        return [(type(s).__name__ if not isinstance(s, Pipeline) else s.name) for s in subjects(target)]

    assert found("snapkv") == ["snapkv"]
    assert set(found("baselines.snapkv")) == {"SnapKV"}
    assert found("int8") == ["Int8", "int8"], "a stage and a spec of one name are both checked"
    assert {"SnapKV", "Ada", "snapkv", "adakv"} <= set(found("baselines")) == set(found("kvframe_baselines"))
    assert (found("spec:int8"), found("encoder:int8")) == (["int8"], ["Int8"])
    assert found("spec:gracekv") == ["gracekv"] != found("gracekv")
    (tmp_path / "mine.yaml").write_text("extends: snapkv\n")
    assert found(str(tmp_path / "mine.yaml")) == ["mine"]


def test_targets_that_are_none(tmp_path):
    with pytest.raises(InputError, match="Nothing to check is named 'snapvk'; did you mean 'snapkv'"):
        subjects("snapvk")
    with pytest.raises(InputError, match=r"'scorer:snapkv'; did you mean 'baselines.snapkv'"):
        subjects("scorer:snapkv")
    with pytest.raises(InputError, match=r"--set changes specs, but 'baselines.snapkv' is no spec"):
        subjects("baselines.snapkv", {"budget.ratio": 4})


def test_check_without_hypothesis(kvframe, monkeypatch):
    monkeypatch.setattr(check_module.importlib.util, "find_spec", lambda name: None)
    done = kvframe("check", "snapkv")
    assert (done.exit_code, "pip install 'kvframe[testing]'" in done.stderr) == (2, True)
