"""The JSON schema of spec files, with the stages of all installed plugins, for editors and for other validators.

It describes a file as it is written: a stage may be a bare name, and a file that extends another may give a stage's
parameters without its name. Every rule is an `if`/`then` on the stage's name, so that a validator's errors carry the
path of the wrong value, not that of the stage."""

from __future__ import annotations

import inspect
from typing import Any

from kvframe import __version__
from kvframe.registry import CORE, Registry, registry
from kvframe.specfile import BUDGETS, EXTENDS
from kvframe.stages import Stage

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ABOUT = {
    "segmenter": "Cuts the tokens into contiguous segments.",
    "scorer": "Says how much each token matters.",
    "allocator": "Spends the budget: decides which tokens become which entries.",
    "encoder": "Maps entries to codes and back.",
    "attention": "The kernel that attends the compressed entries.",
}


def spec_schema(known: Registry | None = None) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of spec files for the stages of `known`; None = all that are installed."""
    from kvframe.spec import STAGE_DEFAULTS, make_spec_class

    known = known or registry()
    schema = make_spec_class(known).model_json_schema()
    properties, kept = schema["properties"], ("Budget", "Protect", "Prefill", "Decode")
    definitions: dict[str, Any] = {name: schema["$defs"][name] for name in kept}
    _budget(definitions["Budget"])
    for kind, classes in known.stages.items():
        for name, stage in classes.items():
            definitions[f"{kind}:{name}"] = _definition(stage, f"{kind}:{name}")
        properties[kind] = _stage_field(kind, classes, STAGE_DEFAULTS[kind])
    extends = {
        "type": "string",
        "minLength": 1,
        "description": "The name of a spec, or a file relative to this one, whose keys hold where this one has none.",
    }
    nameless = {"if": {"type": "object"}, "then": {"required": ["name"]}}
    plugins = ", ".join(f"{p.name} ({p.distribution} {p.version})" for p in known.plugins if p is not CORE)
    return {
        "$schema": DIALECT,
        "$comment": f"Made by kvframe {__version__}; plugins: {plugins or 'none'}.",
        "title": "kvframe pipeline spec",
        "type": "object",
        "additionalProperties": False,
        "properties": {EXTENDS: extends, **properties},
        # A stage without its name is understood only where a base says the name.
        "if": {"not": {"required": [EXTENDS]}},
        "then": {"properties": dict.fromkeys(known.stages, nameless)},
        "$defs": definitions,
    }


def _budget(definition: dict[str, Any]) -> None:
    """Say of the three budgets what only pydantic's validator says: exactly one, and sizes may have units."""
    from kvframe.spec import SIZE

    size = [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE}, {"type": "null"}]
    definition["properties"]["bytes"]["anyOf"] = size
    given = {"not": {"type": "null"}}
    definition["oneOf"] = [{"required": [name], "properties": {name: given}} for name in BUDGETS]


def _definition(stage: type[Stage], key: str) -> dict[str, Any]:
    """A stage as an object: its docstring, paper and fields."""
    schema = stage.model_json_schema(ref_template=f"#/$defs/{key}/$defs/{{model}}")
    text = inspect.getdoc(stage) or ""
    schema["description"] = f"{text}\n\nPaper: {stage.paper}" if stage.paper else text
    schema["title"] = key.partition(":")[2]
    return schema


def _stage_field(kind: str, classes: Any, default: str) -> dict[str, Any]:
    """A stage field: one of the names, or an object whose name says which definition holds."""
    names = [{"const": name, "description": _first_paragraph(stage)} for name, stage in classes.items()]
    chosen = [
        {
            "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {"$ref": f"#/$defs/{kind}:{name}"},
        }
        for name in classes
    ]
    keys = sorted({key for stage in classes.values() for key in stage.model_fields})
    unnamed = {"if": {"not": {"required": ["name"]}}, "then": {"propertyNames": {"enum": keys}}}
    return {
        "description": ABOUT[kind],
        "default": default,
        "anyOf": [*names, {"type": "object"}],
        "if": {"type": "object"},
        "then": {"properties": {"name": {"enum": list(classes)}}, "allOf": [*chosen, unnamed]},
    }


def _first_paragraph(stage: type[Stage]) -> str:
    return " ".join((inspect.getdoc(stage) or "").split("\n\n")[0].split())
