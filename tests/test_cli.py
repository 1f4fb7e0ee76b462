"""The command line: every wrong input is one clear sentence with status 2, and every command does its work."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import yaml
from huggingface_hub.utils import logging as hub_logging
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvframe
from kvframe.cli import app

DROPPING = "budget: {ratio: 2}\nprotect: {sink: 4, recent: 16}\nscorer: uniform\nallocator: top_k\n"
TEXT = "The cat sat on the mat and looked at the moon. A dog barked far away, and nobody knew why. " * 60


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def failure(*arguments: object, status: int = 2) -> str:
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert result.exit_code == status, (result.output, result.exception)
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Llama on disk, with a byte-level tokenizer."""
    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    return folder


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "dropping.yaml"
    file.write_text(DROPPING)
    return file


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_help_needs_no_heavy_import():
    code = "import sys, kvframe.cli; print(sorted({'torch', 'transformers', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("compare", "run", "validate", "schema", "list"):
        assert command in result.stdout


def test_an_interrupt_while_modules_are_imported_is_a_line_too():
    code = """
import sys

class Interrupting:
    def find_spec(self, name, *given):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from kvframe.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted.\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kvframe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvframe {kvframe.__version__}\n"


@pytest.mark.parametrize("command", [["explain"], ["run", "--prompt-file", "text.txt"]])
def test_a_model_that_is_not_there_is_all_that_is_said(command, text, monkeypatch):
    """What the hub's library logs while it tries again and again is not the user's affair."""
    loud = []

    def read(*given, **more):
        loud.append(logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING))
        raise OSError("We couldn't connect to the hub.\nCheckout a long page of links.")

    monkeypatch.chdir(text.parent)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", read)
    hub_logging.set_verbosity_warning()
    said = failure(command[0], "identity", *command[1:], "--model", "nosuch")
    assert "could be read from nosuch (We couldn't connect to the hub); pass 'smollm2'" in said
    assert loud == [False]


def test_version():
    assert invoke("--version").stdout == f"kvframe {kvframe.__version__}\n"


def test_list_shows_what_is_installed():
    result = invoke("list")
    assert result.exit_code == 0
    for name in ("core", "top_k", "int8", "identity", "keep_all", "Full attention through kvframe's cache"):
        assert name in result.stdout


def test_schema_is_json():
    schema = json.loads(invoke("schema").stdout)
    assert "allocator" in schema["properties"]


# --- validate


def test_validate_prints_a_spec_that_validates_again(spec, tmp_path):
    result = invoke("validate", spec, "--set", "budget.ratio=8", "--set", "protect.sink=0")
    assert result.exit_code == 0
    data = yaml.safe_load(result.stdout)
    assert data["budget"]["ratio"] == 8
    assert (data["protect"]["sink"], data["protect"]["recent"], data["protect"]["suffix"]) == (0, 16, 0)
    again = tmp_path / "again.yaml"
    again.write_text(result.stdout)
    assert invoke("validate", again).stdout == result.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("scorer: unifrom\n", "bad.yaml:1: scorer: there is no scorer named 'unifrom'; did you mean 'uniform'?"),
        ("version: 1\nscorers: uniform\n", "bad.yaml:2: scorers: unknown key 'scorers'; did you mean 'scorer'?"),
        ("version: 1\nbudget: {ratio: 0.5}\n", "bad.yaml:2: budget.ratio"),
        ("- a\n- b\n", "a spec is a mapping"),
    ],
)
def test_validate_names_file_and_line(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    assert message in failure("validate", file)


def test_validate_of_what_is_not_there(tmp_path):
    assert "did you mean 'identity'?" in failure("validate", "identiti")
    assert "cannot be read: No such file" in failure("validate", tmp_path / "none.yaml")
    assert "cannot be read" in failure("validate", f"{tmp_path}/")
    assert "--set takes KEY=VALUE" in failure("validate", "identity", "--set", "budget.ratio")
    assert "not valid YAML" in failure("validate", "identity", "--set", "budget.ratio=[")
    assert "unknown key 'sinks'" in failure("validate", "identity", "--set", "protect.sinks=3")


# --- compare


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "0.5"], "--ratios takes numbers of at least 1 (context entries / kept entries), but got '0.5'"),
        (["--ratios", "2,abc"], "but got 'abc'"),
        (["--ratios", "nan"], "but got 'nan'"),
        (["--ratios", "2,2.0"], "names 2 twice"),
        (["--specs", ","], "No spec is named"),
        (["--specs", "identity,identity"], "stands twice"),
        (["--specs", "nowhere/x.yaml"], "cannot be read: No such file"),
        (["--tasks", "niah,poem"], "no task 'poem'"),
        (["--tasks", ""], "No task is named"),
        (["--limit", "0"], "must be at least 1, but is 0"),
        (["--tokens", "-3"], "must be at least 1, but is -3"),
        (["--tokens", "40"], "40 tokens are too few for the task 'niah'"),
        (["--tokens", "2060"], "positions, but the model has 2048"),
        (["--tokens", "90000"], "The text is too short"),
        (["--text", "missing.txt"], "missing.txt could not be read"),
        (["--model", "nowhere/at/all"], "no model at nowhere/at/all"),
        (["--dtype", "float7"], "dtype is 'float7'"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
    ],
)
def test_compare_refuses_bad_input(arguments, message, model_folder, spec, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"--model": model_folder, "--specs": spec, "--text": text, "--tokens": 600, "--out": tmp_path / "out"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert message in failure("compare", *(part for pair in given.items() for part in pair))


def test_compare_refuses_folders_it_cannot_write(model_folder, spec, text, tmp_path):
    (tmp_path / "file").write_text("x")
    said = failure("compare", "--specs", spec, "--model", model_folder, "--out", tmp_path / "file" / "deeper")
    assert "cannot be written" in said


def test_debug_shows_the_traceback(spec):
    result = invoke("compare", "--specs", spec, "--limit", "0", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_a_sentence_too(spec, monkeypatch):
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("of all things\nand more")

    monkeypatch.setattr("kvframe.eval.make_contenders", broken)
    said = failure("compare", "--specs", spec, status=1)
    assert said == "error: unexpected ZeroDivisionError: of all things; --debug shows where."


def test_compare_measures_prints_and_goes_on(model_folder, spec, text, tmp_path):
    command = ["compare", "--model", model_folder, "--specs", f"identity,{spec}", "--ratios", "2,3", "--text", text]
    command += ["--tokens", "600", "--limit", "1", "--tasks", "niah,continuation", "--out", tmp_path / "out"]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    for cell in ("full cache", "identity", "dropping", "2x", "3x", "query-aware", "seed 0"):
        assert cell in result.stdout
    results = tmp_path / "out" / "results.jsonl"
    assert len(results.read_text().splitlines()) == 2 * 4
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| dropping | 3x |" in summary
    results.write_text(results.read_text()[:-30])
    again = invoke(*command)
    assert again.exit_code == 0
    assert "was cut off; it is measured again" in again.stderr
    assert "7 of 8 measurements were there already" in again.stderr


def test_a_failed_spec_is_reported_with_status_2(model_folder, spec, text, tmp_path):
    greedy = tmp_path / "greedy.yaml"
    greedy.write_text(DROPPING.replace("recent: 16", "recent: 500").replace("ratio: 2", "ratio: 2, strict: true"))
    command = ["compare", "--model", model_folder, "--specs", f"{greedy},{spec}", "--ratios", "3", "--text", text]
    result = invoke(*command, "--tokens", "600", "--limit", "1", "--tasks", "continuation", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "greedy 3x failed: The budget of row 0" in result.stdout.replace("\n", " ")
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2


# --- run


def test_run_answers_and_reports(model_folder, spec, text):
    text.write_text(TEXT[:1000])
    result = invoke(
        "run", spec, "--prompt-file", text, "--model", model_folder, "--max-new-tokens", "4", "--question", "Why?"
    )
    assert result.exit_code == 0, result.output
    assert "2.00 in entries (asked 2.00)" in result.stderr
    assert result.stdout.strip() or result.stdout == "\n"
    more = invoke("run", spec, "--prompt-file", text, "--model", model_folder, "--set", "budget.ratio=4")
    assert "4.0" in more.stderr


def test_run_refuses_bad_input(model_folder, spec, text, tmp_path):
    assert "could not be read" in failure("run", spec, "--prompt-file", tmp_path / "none", "--model", model_folder)
    text.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in failure("run", spec, "--prompt-file", text, "--model", model_folder)
    text.write_text("A short prompt that is longer than nothing, though not by very much. " * 3)
    asked = (
        "run",
        spec,
        "--prompt-file",
        text,
        "--model",
        model_folder,
        "--set",
        "budget.ratio=50",
        "--question",
        "Why?",
    )
    assert "below its 20 protected tokens" in failure(*asked, "--set", "budget.strict=true")
    # Otherwise it is answered, and the report says once what became of it.
    result = invoke(*asked)
    assert result.exit_code == 0
    assert result.stderr.count("too short for the budget: only what is protected is kept, 20 tokens at most") == 1
    assert "(asked 50.00)" in result.stderr
