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
        ("budget: {ratio: four}\n", r"budget.ratio: .*valid number"),
        ("budget: {bytes: 64ZB}\n", r"budget.bytes"),
        ("budget: {}\n", r"budget: give exactly one of ratio, entries and bytes, not none"),
        ("budget: {ratio: 2, entries: 3}\n", r"give exactly one of ratio, entries and bytes, not ratio and entries"),
        ("budget: 4\n", r"mine.yaml:1: budget: .*but it is 4"),
        ("version: 2\n", r"version: .*1, but it is 2"),
        ("protect: {sinks: 3}\n", r"unknown key 'sinks'; did you mean 'sink'"),
        ("attention: fast\n", r"there is no attention named 'fast'"),
        ("budget: {ratio: 4}\nallocator: keep_all\n", r"'keep_all' keeps every entry, so the budget would be ignored"),
        ("scorer: [1]\n", r"mine.yaml:1: scorer"),
        ("scorer: {}\n", r"mine.yaml:1: scorer"),
        ("- a\n", r"a spec is a mapping such as 'scorer: uniform', but the file holds a sequence"),
        ("", r"but the file holds nothing"),
        ("scorer: uniform\nscorer: uniform\n", r"mine.yaml:2: the key 'scorer' stands twice"),
        ("scorer:\n\t- x\n", r"mine.yaml:2: not valid YAML: .*indent with spaces, not tabs"),
        ("a: &x 1\nb: *x\n", r"mine.yaml:1: anchors and aliases are not allowed"),
        ("scorer: !!python/object:os.system {}\n", r"mine.yaml:1: scorer"),
        ("scorer: !!python/object/apply:os.system ['true']\n", r"mine.yaml:1"),
        ("budget: {ratio: 4\n", r"mine.yaml:\d+: not valid YAML"),
        ("1: x\n", r"keys must be words"),
        ("\x07", r"not valid YAML"),
    ],
)
def test_wrong_specs_are_explained(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        read_spec(write(tmp_path, text))


def test_every_mistake_is_listed_once(tmp_path):
    with pytest.raises(SpecError) as error:
        read_spec(write(tmp_path, "scorer: nix\nprotect: {x: 1}\n"))
    assert len(str(error.value).splitlines()) == 2


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_spec(tmp_path)
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
