"""Specs: reading, overriding, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

import kvframe
from kvframe.builtin.allocators import TopK
from kvframe.builtin.encoders import Dense
from kvframe.errors import SpecError
from kvframe.registry import registry
from kvframe.spec import PipelineSpec, read_spec, spec_class, validate_spec


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", sorted(registry().specs))
def test_shipped_specs_round_trip(name):
    spec = read_spec(name)
    assert spec.description, "a shipped spec says in a sentence what it is"
    again = validate_spec(spec.dump())
    assert again == spec
    assert again.fingerprint == spec.fingerprint


def test_a_file_and_its_defaults(tmp_path):
    spec = read_spec(write(tmp_path, "budget: {bytes: 64MiB}\nscorer: uniform\n"))
    assert spec.budget.bytes == 64 * 2**20
    assert (spec.allocator.name, spec.encoder.name, spec.attention.name) == ("top_k", "dense", "auto")


def test_overrides():
    spec = read_spec("snapkv", {"budget.entries": 64, "scorer.window": 9, "segmenter": "chunks", "segmenter.size": 5})
    assert (spec.budget.ratio, spec.budget.entries, spec.scorer.window, spec.segmenter.size) == (None, 64, 9, 5)
    assert read_spec("snapkv", {"protect.sink": 1}).protect.recent == read_spec("snapkv").protect.recent
    with pytest.raises(SpecError, match=r"unknown key 'windw' of 'baselines.snapkv'; did you mean 'window'"):
        read_spec("snapkv", {"scorer.windw": 3})


def test_the_fingerprint_sees_everything_but_the_description():
    base = read_spec("snapkv")
    assert read_spec("snapkv", {"description": "other"}).fingerprint == base.fingerprint
    assert read_spec("snapkv", {"budget.ratio": 4.5}).fingerprint != base.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scorer: snapkv\n",
            r"mine.yaml:1: scorer: there is no scorer named 'snapkv'; did you mean 'baselines.snapkv'",
        ),
        ("version: 1\nscorrer: x\n", r"mine.yaml:2: scorrer: unknown key 'scorrer'; did you mean 'scorer'"),
        (
            "segmenter:\n  name: chunks\n  sze: 3\n",
            r"yaml:3: segmenter.sze: unknown key 'sze' of 'chunks'.*'size'",
        ),
        (
            "segmenter: {name: chunks, size: 0}\n",
            r"yaml:1: segmenter.size: .*greater than or equal to 1, but it is 0",
        ),
        ("budget: {ratio: 0.5}\n", r"budget.ratio: .*greater than or equal to 1, but it is 0.5"),
        ("budget: {ratio: .nan}\n", r"budget.ratio: .*finite"),
        ("budget: {ratio: four}\n", r"budget.ratio: must be a number"),
        ("budget: {bytes: 64ZB}\n", r"budget.bytes"),
        ("budget: {}\n", r"budget: give exactly one of ratio, entries and bytes, not none"),
        ("budget: {ratio: 2, entries: 3}\n", r"give exactly one of ratio, entries and bytes, not ratio and entries"),
        ("budget: 4\n", r"mine.yaml:1: budget: .*but it is 4"),
        ("version: 2\n", r"version: .*1, but it is 2"),
        ("protect: {sinks: 3}\n", r"unknown key 'sinks'; did you mean 'sink'"),
        ("attention: fast\n", r"there is no attention named 'fast'"),
        (
            "budget: {ratio: 4}\nallocator: keep_all\n",
            r"mine.yaml:2: allocator 'keep_all' keeps every entry, so the budget would be ignored",
        ),
        ("scorer: [1]\n", r"mine.yaml:1: scorer"),
        ("scorer: {}\n", r"mine.yaml:1: scorer"),
        ("- a\n", r"a spec is a mapping such as 'scorer: uniform', but the file holds a sequence"),
        ("", r"but the file holds nothing"),
        ("scorer: uniform\nscorer: uniform\n", r"mine.yaml:2: the key 'scorer' stands twice"),
        ("scorer:\n\t- x\n", r"mine.yaml:2: not valid YAML: .*indent with spaces, not tabs"),
        ("a: &x 1\nb: *x\n", r"mine.yaml:1: anchors and aliases are not allowed"),
        ("scorer: !!python/object:os.system {name: uniform}\n", r"mine.yaml:1: tags such as '!!python/object:os.sys"),
        ("scorer: !!python/object/apply:os.system ['true']\n", r"mine.yaml:1: tags such as .* are not allowed"),
        ("description: !!str 5\n", r"mine.yaml:1: tags such as '!!str' are not allowed"),
        ("<<: {version: 1}\n", r"mine.yaml:1: not valid YAML: .*merge"),
        ("a: 1\n---\nb: 2\n", r"mine.yaml:2: not valid YAML: .*another document"),
        ("description: 2001-13-45\n", r"mine.yaml:1: the value cannot be read: month must be in 1..12; .*quotes"),
        (f"budget: {{ratio: {'9' * 5000}}}\n", r"mine.yaml:1: the value cannot be read: .*digits"),
        ("budget: " + "[" * 100_000, r"mine.yaml:1: more than 32 levels deep"),
        ("".join(f"{'  ' * n}a:\n" for n in range(40)), r"mine.yaml:33: more than 32 levels deep"),
        ("[a]: 1\n", r"keys must be words, but this one is 'sequence'"),
        ("# " + "x" * 300_000, r"larger than 256 KiB; a spec is a page of text"),
        ("budget: {ratio: 4\n", r"mine.yaml:\d+: not valid YAML"),
        ("1: x\n", r"keys must be words"),
        ("\x07", r"not valid YAML"),
    ],
)
def test_wrong_specs_are_explained(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        read_spec(write(tmp_path, text))


def test_a_bomb_of_aliases_is_refused_before_it_is_built(tmp_path):
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(SpecError, match=r"mine.yaml:1: anchors and aliases are not allowed"):
        read_spec(write(tmp_path, "\n".join(lines)))


def test_what_has_no_end_is_not_read_to_its_end():
    with pytest.raises(SpecError, match="larger than 256 KiB"):
        read_spec(Path("/dev/zero"))


def test_overriding_a_name_drops_the_parameters_of_the_other_stage():
    assert read_spec("snapkv", {"scorer.name": "baselines.h2o"}).scorer.name == "baselines.h2o"
    assert read_spec("snapkv", {"scorer.window": 9, "scorer.name": "baselines.snapkv"}).scorer.window == 9


def test_a_wrong_override_is_not_blamed_on_a_line_of_the_file(tmp_path):
    file = write(tmp_path, "scorer:\n  name: baselines.snapkv\n")
    with pytest.raises(SpecError, match=r"^override: scorer.windw: unknown key"):
        read_spec(file, {"scorer.windw": 1})
    with pytest.raises(SpecError, match=r"^override: scorer: there is no scorer named 'snapvk'"):
        read_spec(file, {"scorer": "snapvk"})
    with pytest.raises(SpecError, match="extends cannot be overridden"):
        read_spec(file, {"extends": "h2o"})


def test_every_mistake_is_listed_once(tmp_path):
    with pytest.raises(SpecError) as error:
        read_spec(write(tmp_path, "scorer: nix\nprotect: {x: 1}\n"))
    assert len(str(error.value).splitlines()) == 2


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_spec(tmp_path)
    with pytest.raises(
        SpecError, match="No such file or directory; the spec of that name is 'snapkv', without an ending"
    ):
        read_spec(tmp_path / "snapkv.yaml")
    with pytest.raises(SpecError, match="cannot be read: embedded null byte"):
        read_spec(tmp_path / "a\0.yaml")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        read_spec(binary)
    with pytest.raises(SpecError, match="no spec named 'snapvk'; did you mean 'snapkv'"):
        kvframe.load("snapvk")


def test_a_streaming_block_needs_an_allocator_that_streams():
    class Once(TopK):
        """Runs once."""

        streams: ClassVar[bool] = False

    plain = read_spec("identity")
    fields = {name: getattr(plain, name) for name in type(plain).model_fields} | {"allocator": Once()}
    with pytest.raises(ValidationError, match=r"cannot run on blocks while decoding, but decode.flush is 8"):
        PipelineSpec(**{**fields, "decode": {"flush": 8}})


def test_heads_coded_jointly_must_hold_the_same_tokens():
    class Joint(Dense):
        """Codes all heads of a layer together."""

        @property
        def joins_heads(self):
            return 0

    plain = read_spec("adakv")
    fields = {name: getattr(plain, name) for name in type(plain).model_fields} | {"encoder": Joint()}
    with pytest.raises(ValidationError, match=r"codes all KV heads jointly, but allocator 'baselines.ada' may keep"):
        PipelineSpec(**fields)


def test_the_schema_names_the_stages_of_plugins():
    assert "baselines.snapkv" in str(spec_class().model_json_schema())
