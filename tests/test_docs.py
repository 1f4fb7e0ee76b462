"""The documents cannot rot: their code is compiled, their specs are read, their commands exist, their files are real.

A block is a fenced block of Markdown. An HTML comment in the line above says more of it: `<!-- file: PATH -->` = it is
that file of the repository, `<!-- run -->` = it is run, `<!-- no spec -->` = YAML that is none."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from installed import install, python

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
DOCUMENTS += sorted(ROOT.glob("tests/thirdparty/*/README.md"))
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its mark and its text."""

    where: str
    language: str
    mark: str
    text: str


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        where = f"{document.relative_to(ROOT)}:{line}"
        found.append(Block(where, match["language"], match["mark"] or "", match["text"]))
    assert text.count("\n```") + text.startswith("```") == 2 * len(found), f"{document}: a fence is not closed"
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def chosen(*languages: str) -> list[pytest.param]:
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", chosen("python"))
def test_python_compiles(block):
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark.startswith("file: ")], ids=lambda block: block.where)
def test_a_file_is_what_the_document_says(block):
    assert block.text == (ROOT / block.mark.removeprefix("file: ")).read_text(encoding="utf-8")


def test_the_tutorial_shows_the_whole_distribution():
    root = ROOT / "tests" / "thirdparty" / "kvframe-lastwords"
    files = {f for f in root.rglob("*") if f.is_file() and "__pycache__" not in f.parts and f.name != "README.md"}
    files = {f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)}
    marks = [block.mark for block in BLOCKS if block.where.startswith("docs/plugins.md")]
    shown = {ROOT / mark.removeprefix("file: ") for mark in marks if mark.startswith("file: ")}
    assert shown == files


@pytest.mark.parametrize("block", chosen("sh", "bash", "console"))
def test_commands_exist(block):
    """Every `kvframe` line names a command, and options that it has."""
    from typer.main import get_command

    from kvframe.cli import app

    commands = get_command(app).commands
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if "kvframe" not in words[:2]:
            continue
        command, *rest = words[words.index("kvframe") + 1 :]
        if command.startswith("-"):
            continue
        assert command in commands, f"{block.where}: there is no command '{command}'"
        known = {
            name for parameter in commands[command].params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert used <= known | {"--help"}, f"{block.where}: {command} has no {used - known}"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Where the distribution of the tutorial is installed."""
    folder = tmp_path_factory.mktemp("docs") / "target"
    install(ROOT / "tests" / "thirdparty" / "kvframe-lastwords", folder)
    return folder


def test_specs_can_be_read(target, tmp_path):
    """Every YAML block is a spec; those of the tutorial need its plugin, so all are read where it is installed."""
    specs = [block for block in BLOCKS if block.language == "yaml" and block.mark != "no spec"]
    for number, block in enumerate(specs):
        (tmp_path / f"{number}.yaml").write_text(block.text, encoding="utf-8")
    code = """
import json
from pathlib import Path
import kvframe
found = {}
for file in Path().glob("*.yaml"):
    try:
        found[file.stem] = kvframe.load(file).spec.fingerprint and ""
    except Exception as error:
        found[file.stem] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
    done = python(target, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    problems = {specs[int(number)].where: text for number, text in json.loads(done.stdout).items() if text}
    assert len(specs) >= 3
    assert problems == {}


def test_marks_are_known():
    assert {block.mark.partition(":")[0] for block in BLOCKS} == {"", "file", "run"} | (
        {"no spec"} & {block.mark for block in BLOCKS}
    )


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "run"], ids=lambda block: block.where)
def test_python_that_is_marked_runs(block, target, tmp_path):
    done = python(target, "-c", block.text, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
