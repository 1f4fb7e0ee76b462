"""Calibration artefacts: what a stage learned of a model, in a safetensors file that says what it belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvframe.errors import InputError
from kvframe.rope import LayerRopes, Rope
from kvframe.types import ModelInfo

# Counts up when what stands in the file changes.
FORMAT = 1
KIND = "kvframe calibration"


@dataclass(frozen=True, eq=False)
class Artefact:
    """What was learned, and from what.

    Attributes:
        stage: name of the stage that learned it.
        parameters: fingerprint of those of the stage's parameters that it depends on.
        model, rope: fingerprints.
        text: hash of the text it was learned from; "" if unknown.
        tokens: how many of its tokens were read.
        tensors: what was learned.
    """

    stage: str
    parameters: str
    model: str
    rope: str
    text: str
    tokens: int
    tensors: Mapping[str, Tensor]

    @property
    def metadata(self) -> dict[str, str]:
        """What stands in the file beside the tensors."""
        return {
            "kind": KIND,
            "format": str(FORMAT),
            "stage": self.stage,
            "parameters": self.parameters,
            "model": self.model,
            "rope": self.rope,
            "text": self.text,
            "tokens": str(self.tokens),
        }

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises InputError if it cannot be written."""
        write_whole(path, {name: t.contiguous() for name, t in self.tensors.items()}, self.metadata, "calibration")

    def check(self, path: Path, stage: str, parameters: str, model: ModelInfo, remedy: str) -> None:
        """Raise InputError, ending in `remedy`, unless this belongs to the stage, its parameters and the model."""
        expected = (
            ("stage", self.stage, stage, f"it was made for the stage '{self.stage}', not '{stage}'"),
            ("model", self.model, model.fingerprint, f"it was made for another model than this {model.name}"),
            ("rope", self.rope, rope_fingerprint(model.rope), "it was made with another RoPE scaling or base"),
            ("parameters", self.parameters, parameters, "it was made with other parameters of the stage"),
        )
        for _, mine, theirs, reason in expected:
            if mine != theirs:
                raise InputError(f"The calibration {path} does not fit: {reason}; {remedy}")


def check_target(path: Path, what: str) -> None:
    """Raise InputError unless a file can be put there: nothing is, or a file that may be replaced."""
    reason = ""
    if not path.name or "\0" in str(path):
        reason = "it names no file"
    elif path.exists() and not path.is_file():
        # Replacing a device or a pipe would destroy it.
        reason = "there is something that is no file"
    if reason:
        raise InputError(f"The {what} cannot be written to '{path}': {reason}; name another file.")


def write_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], what: str) -> None:
    """Write a safetensors file, whole or not at all: beside its place first. Raises InputError, naming `what` it is, if
    it cannot be written."""
    check_target(path, what)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()  # safetensors would make a file for its owner alone; this has the user's own mode
        mode = partial.stat().st_mode
        save_file(dict(tensors), partial, metadata=dict(metadata))
        partial.chmod(mode)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"The {what} could not be written to {path} ({error}); name another file.") from error
    finally:
        # Where nothing could be written there may be no folder to look in either.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load_artefact(path: Path, remedy: str) -> Artefact:
    """Read an artefact. Raises InputError, ending in `remedy`, if there is none, or it is truncated or of another
    format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise InputError(f"The file {path} is no calibration; {remedy}")
            if metadata.get("format") != str(FORMAT):
                raise InputError(
                    f"The calibration {path} has format {metadata.get('format')}, but this version reads {FORMAT}; "
                    f"{remedy}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no calibration at {path}; {remedy}") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"The calibration {path} cannot be read ({error}); {remedy}") from error
    names = ("stage", "parameters", "model", "rope", "text")
    named = {name: metadata.get(name, "") for name in names}
    return Artefact(**named, tokens=int(metadata.get("tokens", 0)), tensors=tensors)


def rope_fingerprint(rope: Rope | LayerRopes) -> str:
    """12 hexadecimal digits of a rotation's frequencies and scaling; of each layer's, if they are not alike."""
    digest = hashlib.sha256()
    for each in rope.layers if isinstance(rope, LayerRopes) else (rope,):
        digest.update(each.inv_freq.detach().float().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(str(each.scaling).encode())
    return digest.hexdigest()[:12]
