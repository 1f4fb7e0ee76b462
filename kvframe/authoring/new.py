"""Writes the package of a new plugin, which works as it is and whose tests pass."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from kvframe import __version__
from kvframe.errors import InputError
from kvframe.naming import nearest
from kvframe.registry import registry
from kvframe.stages import KINDS

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAX_NAME = 40
RESERVED = ("core", "testing")
# Names that the templates use, beside the stage kinds.
TAKEN = (
    "Literal",
    "Tensor",
    "Any",
    "ClassVar",
    "Field",
    "Observation",
    "Segments",
    "Plan",
    "LayerPlan",
    "Encoded",
    "Entries",
)
SUMMARIES = {
    "segmenter": "A segmenter for kvframe.",
    "scorer": "A scorer for kvframe.",
    "allocator": "An allocator for kvframe.",
    "encoder": "An encoder for kvframe.",
    "attention": "An attention kernel for kvframe.",
}


@dataclass(frozen=True)
class Package:
    """What was written: the package's folder, and its files."""

    folder: Path
    files: tuple[Path, ...]


def write_package(name: str, kind: str, parent: Path) -> Package:
    """Write the package `kvframe-<name>`, with one stage of the kind, into a new folder in `parent`.

    Raises InputError for a name that cannot be used, a kind that does not exist, a folder that is there already, or one
    that cannot be written; nothing is overwritten."""
    check_name(name)
    kinds = [stage.kind for stage in KINDS]
    if kind not in kinds:
        raise InputError(f"There is no stage kind '{kind}'{nearest(kind, kinds)}")
    values = names(name, kind)
    package = values["package"]
    folder = parent.expanduser() / values["distribution"]
    contents = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": "__init__.py",
        f"{package}/{kind}.py": f"{kind}.py",
        f"{package}/specs/{name}.yaml": f"{kind}.yaml",
        "tests/test_conformance.py": "test_conformance.py",
    }
    rendered = {file: _template(template).substitute(values) for file, template in contents.items()}
    if folder.exists():
        raise InputError(f"{folder} is there already and is left as it is; choose another name or --dir.")
    try:
        for file, text in rendered.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}; choose another --dir.") from error
    return Package(folder, tuple(folder / file for file in rendered))


def check_name(name: str) -> None:
    """Raise InputError unless `name` can name a plugin."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        words = re.findall(r"[a-z0-9]+", name.lower())
        proposal = "-".join(words).lstrip("-0123456789")[:MAX_NAME].rstrip("-") or "my-method"
        raise InputError(
            f"A method's name is lower-case words joined by hyphens, at most {MAX_NAME} letters, but got '{name}'; "
            f"try '{proposal}'."
        )
    if name.startswith("kvframe"):
        raise InputError(f"The prefix kvframe- is added by itself; leave it off: '{name.removeprefix('kvframe-')}'.")
    if name in RESERVED:
        raise InputError(f"'{name}' belongs to kvframe itself; choose another name.")
    class_name = names(name, "scorer")["class_name"]
    if keyword.iskeyword(class_name) or class_name in TAKEN:
        raise InputError(
            f"The stage of '{name}' would be the class {class_name}, which means something else already; try "
            f"'{name}-method'."
        )
    known = registry()
    owners = {owner.name for owner in known.owners.values()}
    if name in known.specs or name.replace("-", "_") in owners:
        raise InputError(f"A spec or plugin '{name}' is installed already; choose another name.")


def names(name: str, kind: str) -> dict[str, str]:
    """What the templates are filled with."""
    plugin = name.replace("-", "_")
    return {
        "name": name,
        "plugin": plugin,
        "package": f"kvframe_{plugin}",
        "distribution": f"kvframe-{name}",
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "kind": kind,
        "stage": f"{plugin}.{kind}",
        "summary": SUMMARIES[kind],
        "version": __version__,
    }


def _template(name: str) -> Template:
    return Template((files("kvframe.authoring") / "templates" / f"{name}.template").read_text(encoding="utf-8"))
