"""The schema agrees with what kvframe itself accepts, and its errors carry the right path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from kvframe.authoring.schema import spec_schema
from kvframe.errors import SpecError
from kvframe.registry import build, registry
from kvframe.spec import read_spec, validate_spec


@pytest.fixture(scope="module")
def validator():
    schema = spec_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(json.loads(json.dumps(schema)))


@pytest.mark.parametrize("name", sorted(registry().specs))
def test_every_shipped_spec_is_valid(validator, name):
    validator.validate(yaml.safe_load(registry().specs[name].read_text(encoding="utf-8")))
    validator.validate(read_spec(name).dump())


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, known in registry().stages.items() for name in known]
)
def test_every_stage_may_be_written_in_both_ways(validator, kind, name):
    validator.validate({kind: name})
    validator.validate({kind: {"name": name}})
    errors = list(validator.iter_errors({kind: {"name": name, "no_such_key": 1}}))
    assert [list(error.absolute_path) for error in errors] == [[kind]]
    assert "no_such_key" in errors[0].message


@pytest.mark.parametrize(
    "text",
    [
        "budget: {bytes: 64MiB}",
        "budget: {bytes: 1.5 GB}",
        "budget: {bytes: 4096}",
        "budget: {ratio: 4, entries: null, bytes: null}",
        "extends: snapkv\nscorer: {window: 9}",
        "extends: ../base.yaml",
        "decode: {flush: null}",
        "{}",
    ],
)
def test_what_is_right(validator, text):
    data = yaml.safe_load(text)
    validator.validate(data)
    if "extends" not in data:
        validate_spec(data)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("budget: {ratio: 0.5}", ["budget", "ratio"]),
        ("budget: {ratio: four}", ["budget", "ratio"]),
        ("budget: {ratio: 2, entries: 3}", ["budget"]),
        ("budget: {}", ["budget"]),
        ("budget: {bytes: 64ZB}", ["budget", "bytes"]),
        ("protect: {sinks: 3}", ["protect"]),
        ("protect: {recent: -1}", ["protect", "recent"]),
        ("scorer: snapkv", ["scorer"]),
        ("scorer: {name: snapkv}", ["scorer", "name"]),
        ("scorer: {name: baselines.snapkv, window: 0}", ["scorer", "window"]),
        ("scorer: {name: baselines.snapkv, windw: 3}", ["scorer"]),
        ("scorer: {name: baselines.snapkv, pool: median}", ["scorer", "pool"]),
        ("scorer: {window: 3}", ["scorer"]),
        ("scorer: [1]", ["scorer"]),
        ("segmenter: {name: chunks, size: large}", ["segmenter", "size"]),
        ("encoder: top_k", ["encoder"]),
        ("attention: null", ["attention"]),
        ("decode: {flush: 0}", ["decode", "flush"]),
        ("version: 2", ["version"]),
        ("scorrer: uniform", []),
        ("[]", []),
    ],
)
def test_what_is_wrong_is_rejected_where_it_stands(validator, text, path):
    data = yaml.safe_load(text)
    with pytest.raises(SpecError):
        validate_spec(data)
    errors = list(validator.iter_errors(data))
    assert errors
    assert [list(error.absolute_path) for error in errors] == [path] * len(errors)
    assert best_match(errors).message


def test_an_unknown_key_is_wrong_beside_extends_too(validator):
    assert [list(e.absolute_path) for e in validator.iter_errors({"extends": "x", "scorer": {"windw": 1}})] == [
        ["scorer"]
    ]
    assert [list(e.absolute_path) for e in validator.iter_errors({"extends": 1})] == [["extends"]]


def test_fields_come_with_what_is_known_of_them():
    schema = spec_schema()
    stage = schema["$defs"]["scorer:baselines.snapkv"]
    assert stage["properties"]["window"] == {
        "default": 64,
        "minimum": 1,
        "title": "Window",
        "type": "integer",
        "description": "Tokens at the end of the prompt whose queries are observed.",
    }
    assert "2404.14469" in stage["description"]
    assert "baselines (kvframe" in schema["$comment"]


def test_every_reference_leads_somewhere(validator):
    schema = spec_schema()

    def references(node):
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for item in node:
                yield from references(item)

    for reference in references(schema):
        found = schema
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
        assert found


def test_the_schema_of_core_alone_knows_no_plugin():
    text = json.dumps(spec_schema(build([])))
    assert "plugins: none" in text
    assert "baselines" not in text


def test_named_specs_of_the_repository_are_all_seen():
    """The schema is tested on every YAML spec that is shipped, found from the files, not only from the registry."""
    root = Path(__file__).parents[2]
    files = {f.stem for folder in ("kvframe", "plugins") for f in (root / folder).rglob("specs/*.yaml")}
    assert files <= set(registry().specs)
