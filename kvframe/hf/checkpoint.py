"""What a model is read from: a folder, a GGUF file or a hub id. Whatever keeps it from being read is a `ModelError`."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvframe.arguments import expect
from kvframe.errors import ModelError

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
GGUF_MAGIC = b"GGUF"
MAX_REASON = 240


@dataclass(frozen=True)
class Checkpoint:
    """Where a model's weights, configuration and tokenizer are.

    Fields:
        location: a folder, or a hub id.
        gguf_file: the name of the GGUF file inside the folder, or None for the usual files.
        local: never ask the hub.
        remedy: what to change if reading fails, for the error message.
    """

    location: str
    gguf_file: str | None = None
    local: bool = True
    remedy: str = "name a folder that save_pretrained wrote for a causal language model and its tokenizer"

    def __str__(self) -> str:
        return str(Path(self.location, self.gguf_file)) if self.gguf_file else self.location

    def read(self, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Read the model, in evaluation mode on the CPU, and its tokenizer.

        GGUF weights are dequantised, so that the model's layers are ordinary ones.

        Args:
            dtype: of the weights; "auto" takes the checkpoint's own.

        Raises:
            ModelError: anything that keeps the model from being read, weights that the checkpoint lacks included.
        """
        if self.gguf_file is not None:
            _check_gguf(Path(self.location, self.gguf_file))
        where: dict[str, Any] = {"local_files_only": self.local}
        weights: dict[str, Any] = {"dtype": dtype}
        if self.gguf_file is not None:
            where["gguf_file"] = self.gguf_file
            weights["quantization_config"] = GgufConfig(dequantize=True)
        try:
            # The cheap parts first: a wrong name fails once, before any weight is read.
            AutoConfig.from_pretrained(self.location, **where)
            tokenizer = AutoTokenizer.from_pretrained(self.location, **where)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.location, output_loading_info=True, **where, **weights
            )
            model, info = loaded
        # Readers of checkpoints fail with almost any type of exception, and each means the same to the user.
        except Exception as error:
            raise ModelError(f"No model could be read from {self} ({first_line(error)}); {self.remedy}.") from error
        if missing := sorted(info["missing_keys"]):
            # transformers only warns, and fills them with random numbers.
            raise ModelError(
                f"The checkpoint {self} lacks {len(missing)} of the model's weights, such as {missing[0]}; "
                f"{self.remedy}."
            )
        return model, tokenizer


def find_checkpoint(name: str | Path) -> Checkpoint:
    """Say what `name` is: a file or folder that exists, or else, if it looks like one, a hub id.

    Raises:
        ModelError: a path where there is nothing, or a file or folder that holds no model.
        InputError: what is no name.
    """
    expect("The name of a model", name, (str, Path), "a str or a pathlib.Path")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"The folder {path} holds no model: it has no config.json; {Checkpoint.remedy}, or a .gguf file."
            )
        return Checkpoint(str(path))
    if path.is_file():
        return Checkpoint(
            str(path.parent), gguf_file=path.name, remedy="name a complete GGUF file of a causal language model"
        )
    if isinstance(name, Path) or path.suffix == ".gguf" or not HUB_ID.fullmatch(name):
        raise ModelError(f"There is no model at {path}: no such file or folder; check the path.")
    return Checkpoint(
        name, local=False, remedy="pass 'smollm2', an existing folder or .gguf file, or an id that the hub can serve"
    )


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"The file {path} could not be read ({first_line(error)}); check its permissions.") from error
    if start != GGUF_MAGIC:
        raise ModelError(
            f"The file {path} is no GGUF file: it starts with {start!r} instead of {GGUF_MAGIC!r}; "
            "name a .gguf file, or the folder that holds the model."
        )
    if not all(importlib.util.find_spec(package) for package in ("gguf", "accelerate")):
        raise ModelError(
            "Reading a GGUF file needs the packages gguf and accelerate; install them with: pip install 'kvframe[eval]'"
        )


def first_line(error: Exception) -> str:
    """The first line of the error's text: transformers likes to add lists of all models, and links."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return textwrap.shorten(text, MAX_REASON, placeholder=" ...").rstrip(".")
